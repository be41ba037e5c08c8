// Compiled once per instruction set: MAGEP_ISA names the namespace, the compiler flags do the rest.
#include "kernels.h"

#include "adam.h"
#include "dense.h"
#include "equivariant.h"
#include "invariant.h"
#include "linear.h"

#define MAGEP_STRING2(x) #x
#define MAGEP_STRING(x) MAGEP_STRING2(x)

namespace magep {
namespace MAGEP_ISA {

template <typename S, typename T>
constexpr Kernels<S, T> entries() {
  return {&chain_products<S, T>,
          &chain_products_backward<S, T>,
          &equivariant_forward<S, T>,
          &equivariant_backward<S, T>,
          &linear_forward<S, T>,
          &linear_backward<S, T>,
          &invariant_forward<S, T>,
          &invariant_backward<S, T>,
          &dense_forward<T>,
          &dense_backward<T>,
          &adam<T>};
}

extern const KernelTable table;
const KernelTable table{MAGEP_STRING(MAGEP_ISA), entries<float, float>(), entries<double, double>(),
                        entries<BFloat16, float>(), entries<Float16, float>()};

}  // namespace MAGEP_ISA
}  // namespace magep
