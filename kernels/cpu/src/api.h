// abi.h as the C++ sources see it: C linkage, exported from the library.
#pragma once

#include <stdint.h>

#pragma GCC visibility push(default)
extern "C" {
#include "abi.h"
}
#pragma GCC visibility pop
