"""Number formats of the expert weights: NVFP4 (Four Over Six) and MXFP8."""
