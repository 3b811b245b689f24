"""Where tiles come from: dense, packed and paged tensors, lists of blocks, tiles that CTAs share."""
