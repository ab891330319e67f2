// The device's Python interface.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "accesses.h"
#include "clocks.h"
#include "generator.h"
#include "group.h"
#include "memory.h"
#include "recorder_python.h"

namespace simdev {
namespace {

void bind_findings(py::module& m) {
  py::class_<Finding>(m, "Finding")
      .def_readonly("operation", &Finding::what)
      .def_readonly("where", &Finding::where)
      .def_readonly("earlier_operation", &Finding::other)
      .def_readonly("earlier_where", &Finding::other_where)
      .def_readonly("stream", &Finding::stream)
      .def_readonly("earlier_stream", &Finding::other_stream)
      .def_readonly("writes", &Finding::writes)
      .def_readonly("earlier_writes", &Finding::other_writes)
      .def_readonly("size_bytes", &Finding::bytes)
      .def_readonly("stack", &Finding::stack);
  m.def("set_passed_over", &checker::set_passed_over);
  m.def("start_checking", &checker::start);
  m.def("stop_checking", &checker::stop);
  m.def("is_checking", [] { return checker::on; });
  m.def("races", &checker::races);
  m.def("early_frees", &checker::early_frees);
  m.def("host_reads", &checker::host_reads);
  m.def("host_waits", &checker::host_waits);
  m.def("checked", &checker::checked);
}

void bind_memory(py::module& m) {
  py::class_<Stats>(m, "Stats")
      .def_readonly("allocated_bytes", &Stats::allocated)
      .def_readonly("peak_allocated_bytes", &Stats::peak_allocated)
      .def_readonly("rounded_bytes", &Stats::rounded)
      .def_readonly("peak_rounded_bytes", &Stats::peak_rounded)
      .def_readonly("reserved_bytes", &Stats::reserved)
      .def_readonly("peak_reserved_bytes", &Stats::peak_reserved)
      .def_readonly("blocks", &Stats::blocks)
      .def_readonly("segments", &Stats::segments)
      .def_readonly("retries", &Stats::retries);
  m.def("memory_stats", &memory_stats, py::arg("host") = false);
  py::class_<InHostMemory>(m, "InHostMemory").def(py::init<bool>());
  m.def("reset_peaks", &reset_peaks);
  m.def("empty_cache", &empty_cache);
  m.def("limit_memory", &limit_memory);
  m.def("set_virtual", &set_virtual);
  m.def("is_virtual", &is_virtual);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_hooks();
  register_kernels();
  bind_findings(m);
  bind_memory(m);
  m.def("start_clock", [](double flops, double memory, double host_copy, double host_memory, double dilation) {
    wall::start({flops, memory, host_copy, host_memory, dilation});
  });
  m.def("current_stream", &current_stream);
  m.def("keep_launch_order", &keep_launch_order);
  m.def("default_generator", &default_generator);
  m.def("listen", &recorder::listen);
  m.def("make_group", &make_group, py::arg("rank"), py::arg("size"), py::arg("gloo"), py::arg("timeout"));
}

}  // namespace simdev
