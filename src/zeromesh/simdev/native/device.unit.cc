// What is compiled together: parsing torch's headers takes most of the time, and so it is done once a unit.
#include "accesses.cpp"
#include "clocks.cpp"
#include "kernels.cpp"
#include "memory.cpp"
#include "runtime.cpp"
#include "tensors.cpp"
#include "wall.cpp"
