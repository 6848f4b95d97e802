// torch asks for this name; it needs nothing of it here.
#pragma once
