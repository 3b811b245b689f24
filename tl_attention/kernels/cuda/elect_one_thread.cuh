// tl_shuffle_elect<0> for threads [128, groups]. That of TileLang 0.1.15 uses threadIdx.x alone: the first warp of each group would
// initialize the barriers.
#pragma once

#include <tl_templates/cuda/intrin.h>
namespace tl {
template <> TL_DEVICE bool tl_shuffle_elect<0, false>() {
  return cute::elect_one_sync() && threadIdx.x < 32 && threadIdx.y == 0;
}
}
