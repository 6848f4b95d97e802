// torch asks for this name; the types are in the other file.
#pragma once
#include "cuda_runtime_api.h"
