"""Number formats of the expert weights: NVFP4 (Four Over Six) and MXFP8."""

from typing import Literal

ExpertFormat = Literal["nvfp4", "mxfp8", "bf16"]
"""How a layer's routed experts are stored; `bf16` stands for the model's own dtype."""
