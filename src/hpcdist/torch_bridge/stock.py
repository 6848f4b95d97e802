"""torch's own functions in the places that hpcdist took, by the name of the place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STOCK: dict[str, Callable[..., Any]] = {}
