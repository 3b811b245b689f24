"""What a user calls: functions with the signatures of flash_attn and of PyTorch's flex_attention, KV caches, block masks."""
