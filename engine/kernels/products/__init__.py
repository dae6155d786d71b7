"""Matrix products: fused, quantized, and grouped by experts."""
