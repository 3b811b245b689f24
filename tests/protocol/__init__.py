"""Check of the kernels' protocol without a GPU: no run of a kernel can hang or race."""
