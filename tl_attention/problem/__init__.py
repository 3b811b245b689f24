"""What is asked: the static part of a call, its options, the program of a score or mask function, the GPU."""
