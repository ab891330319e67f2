// The recorder's Python side, apart from what the device's own code needs of it.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace simdev::recorder {

// What is told of everything from now on; none ends it.
void listen(const py::object& function);

}  // namespace simdev::recorder
