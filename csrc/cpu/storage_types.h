// The 16-bit storage types, which are only ever converted.
#pragma once

#include <cstdint>

namespace magep {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

}  // namespace magep
