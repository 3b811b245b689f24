"""What kernels are made of whatever they compute: softmax, products, pipeline, schedules, roles of warps."""
