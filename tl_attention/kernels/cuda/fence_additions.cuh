// Order of additions by TMA. Those of other CTAs are complete, by a barrier. This fence puts the additions of this thread after them.
#pragma once
#include <tl_templates/cuda/common.h>

TL_DEVICE void tl_attention_fence_additions() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
