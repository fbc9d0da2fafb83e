// What the computations of every instruction set use. It comes before their pragma and so is compiled for any processor: functions of the standard
// library that the linker may choose for all others.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "kernels.h"
#include "race.h"
#include "target.h"
