// Kernels: torch's own for the host, on the same memory. In virtual mode, its meta kernels, which only compute shapes.
//
// Every operator without a composite kernel in torch comes to `fallback`. Others here make memory, views, or copies
// between device and host. All report the memory that they touch to checker and recorder.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <set>

#include "clocks.h"
#include "generator.h"
#include "recorder.h"
#include "tensors.h"

namespace simdev {
namespace {

using c10::IValue;

at::Tensor as_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

at::Tensor new_on_device(const at::Tensor& like) {
  return at::detail::empty_strided_generic(
      like.sizes(), like.strides(), device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.scalar_type());
}

// A tensor of the device among an operator's arguments.
struct Operand {
  at::Tensor tensor;
  bool reads, writes;
};

// Applies `visit` to every tensor of a value.
template <typename Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) visit(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) visit(*tensor);
}

template <typename Visit>
void for_each_on_device(const IValue& value, const Visit& visit) {
  for_each_tensor(value, [&visit](const at::Tensor& tensor) {
    if (on_device(tensor)) visit(tensor);
  });
}

bool writes(const c10::Argument& argument) { return argument.alias_info() != nullptr && argument.alias_info()->isWrite(); }

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  return false;
}

// Whether an operator overwrites an argument without reading it.
bool overwrites(const std::string& name, const c10::Argument& argument) {
  static const std::set<std::string> names{"aten::zero_", "aten::fill_", "aten::random_", "aten::normal_", "aten::uniform_"};
  return writes(argument) && (argument.is_out() || names.count(name) != 0);
}

// Operators for whose values the host waits on CUDA: their result's size depends on these, or goes to the host.
bool reads_on_host(const std::string& name) {
  static const std::set<std::string> names{
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::bincount", "aten::repeat_interleave",
      "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive"};
  return names.count(name) != 0;
}

// Operators that take tensors of both host and device: indices, and copies.
bool takes_both(const std::string& name) {
  static const std::set<std::string> names{"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_foreach_copy_"};
  return names.count(name) != 0;
}

// Applies `change` to every tensor of a value.
template <typename Change>
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

// Bytes of a tensor in memory; an expanded tensor has fewer than its shape says.
double held_bytes(const at::Tensor& tensor) {
  auto bytes = static_cast<double>(tensor.itemsize());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) != 0) bytes *= static_cast<double>(tensor.size(dim));
  return bytes;
}

// An operator on virtual host memory takes the calling thread's time.
void take_time(bool on_host, double flops, double bytes) {
  if (on_host)
    wall::host_works(bytes);
  else
    wall::kernel(current_stream(), flops, bytes);
}

// One call of an operator on the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), schema_(op.schema()) {
    const auto last = torch::jit::last(stack, schema_.arguments().size());
    arguments_.assign(last.begin(), last.end());
    torch::jit::drop(stack, arguments_.size());
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& argument = schema_.arguments()[i];
      const bool read = !overwrites(schema_.name(), argument), written = writes(argument);
      for_each_on_device(arguments_[i], [&](const at::Tensor& tensor) { operands_.push_back({tensor, read, written}); });
    }
  }

  std::vector<IValue> run() {
    const std::string& name = schema_.name();
    if (!takes_both(name)) require_one_device();
    const InHostMemory results_too(is_of_host());
    if (reads_on_host(name)) {
      checker::host_read(name, current_stream(), 0);
      host_waits_for(current_stream());
    }
    const bool known = all_known();
    if (!known && reads_on_host(name)) refuse("its result depends on values that the virtual device does not have");
    std::vector<IValue> found = known ? computed(at::kCPU) : virtual_results();
    std::vector<IValue> results(found.size());
    for (size_t i = 0; i < found.size(); ++i) results[i] = result(i, found[i]);
    for (const auto& operand : operands_)
      if (operand.writes) wrote(operand.tensor, known);
    report(results);
    if (wall::on() && !is_view(schema_)) take_time(is_of_host(), flops(results), moved_bytes(results));
    return results;
  }

 private:
  // A device refuses host tensors together with its own, except 0-d ones. Lists are compared element by element.
  void require_one_device() const {
    std::vector<bool> ours, theirs;
    bool one = false, other = false;  // beside the lists
    const bool listed = schema_.name().rfind("aten::_foreach_", 0) == 0;
    const auto count = [](const at::Tensor& tensor, auto&& device, auto&& host) {
      if (on_device(tensor)) device = true;
      if (tensor.defined() && tensor.device().is_cpu() && tensor.dim() != 0) host = true;
    };
    for (const auto& value : arguments_) {
      size_t index = 0;
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        if (!listed || !value.isTensorList()) {
          count(tensor, one, other);
        } else {
          if (index == ours.size()) ours.push_back(false), theirs.push_back(false);
          count(tensor, ours[index], theirs[index]);
          ++index;
        }
      });
    }
    bool mixed = one && other;
    for (size_t i = 0; i < ours.size(); ++i) mixed = mixed || ((one || ours[i]) && (other || theirs[i]));
    TORCH_CHECK(!mixed, "Expected all tensors to be on the same device, but ", schema_.operator_name(), " got some on the simulated device and others on the host");
  }

  // [Note: The host]. A 0-d operand may be anywhere.
  bool is_of_host() const {
    for (const auto& operand : operands_)
      if (operand.tensor.dim() != 0 && in_host_memory(operand.tensor)) return true;
    return false;
  }

  bool all_known() const {
    if (!is_virtual()) return true;
    for (const auto& operand : operands_)
      if (!is_backed(operand.tensor) || (operand.reads && !is_known(operand.tensor))) return false;
    if (mutates_only() || reads_on_host(schema_.name())) return true;
    for (const auto& value : computed(at::kMeta)) {  // results may be large although arguments are small
      bool small = true;
      changed(value, [&](const at::Tensor& tensor) {
        small = small && (!tensor.defined() || tensor.nbytes() <= kWordBytes);
        return tensor;
      });
      if (!small) return false;
    }
    return true;
  }

  std::vector<IValue> virtual_results() const {
    if (mutates_only()) return std::vector<IValue>(schema_.returns().size());
    return computed(at::kMeta);
  }

  // Whether it only returns arguments whose shapes are known.
  bool mutates_only() const {
    for (const auto& result : schema_.returns())
      if (!writes(result)) return false;
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (arguments_[i].isTensor() && is_to_be_sized(schema_.arguments()[i], arguments_[i].toTensor())) return false;
    return true;
  }

  // Runs torch's kernel for the host, or for the meta device.
  std::vector<IValue> computed(c10::DeviceType where) const {
    torch::jit::Stack stack;
    for (size_t i = 0; i < arguments_.size(); ++i) stack.push_back(moved(arguments_[i], schema_.arguments()[i], where));
    const auto key = where == at::kMeta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(key), &stack);
    } catch (const c10::NotImplementedError&) {
      if (where == at::kMeta) refuse("torch has no kernel that finds its shapes alone");
      throw;
    }
    return stack;
  }

  [[noreturn]] void refuse(const char* reason) const {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, schema_.operator_name(), " cannot run on the virtual device: ", reason, ". Use another operator there, register ",
        "a meta kernel for it (torch.library.register_fake), or start the device with virtual=False");
  }

  static IValue moved(const IValue& value, const c10::Argument& argument, c10::DeviceType where) {
    if (argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())))
      return where == at::kMeta ? IValue() : IValue(host_generator(value.toOptional<at::Generator>()));
    if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) return c10::Device(where);
    return changed(value, [where, &argument](const at::Tensor& tensor) {
      if (is_to_be_sized(argument, tensor)) return at::empty({0}, tensor.options().device(where));
      if (!tensor.defined() || tensor.device().type() == where) return tensor;
      if (where == at::kMeta) return tensor.dim() == 0 && !on_device(tensor) ? tensor : as_meta(tensor);
      return on_device(tensor) ? on_host(tensor) : tensor;
    });
  }

  // Whether it is an `out=` without elements, which the operator resizes.
  static bool is_to_be_sized(const c10::Argument& argument, const at::Tensor& tensor) {
    return argument.is_out() && on_device(tensor) && tensor.numel() == 0;
  }

  static IValue sized(const at::Tensor& out, const at::Tensor& found) {
    out.resize_(found.sizes());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(found.sizes(), found.strides());
    if (!found.is_meta()) on_host(out).copy_(found);
    return out;
  }

  // Returns a result to the caller: an argument itself, a view of one, or new memory of the device.
  IValue result(size_t index, const IValue& found) {
    const auto* alias = schema_.returns()[index].alias_info();
    if (alias != nullptr) {
      for (size_t i = 0; i < arguments_.size(); ++i) {
        const auto* other = schema_.arguments()[i].alias_info();
        if (other == nullptr || !(*other == *alias)) continue;
        const bool size = arguments_[i].isTensor() && is_to_be_sized(schema_.arguments()[i], arguments_[i].toTensor());
        if (size && found.isTensor() && found.toTensor().defined()) return sized(arguments_[i].toTensor(), found.toTensor());
        return alias->isWrite() ? arguments_[i] : IValue(view_of(arguments_[i].toTensor(), found.toTensor()));
      }
    }
    return changed(found, [](const at::Tensor& tensor) {
      if (!tensor.defined() || on_device(tensor)) return tensor;
      at::Tensor made = new_on_device(tensor);
      if (!tensor.is_meta()) {
        on_host(made).copy_(tensor);
        wrote(made, true);
      }
      return made;
    });
  }

  static at::Tensor view_of(const at::Tensor& base, const at::Tensor& found) {
    TORCH_CHECK(base.scalar_type() == found.scalar_type(), "the simulated device cannot view ", base.scalar_type(), " as ", found.scalar_type());
    return at::cpu::as_strided(base, found.sizes(), found.strides(), base.storage_offset() + found.storage_offset());
  }

  void report(const std::vector<IValue>& results) {
    if (is_of_host()) return;
    if (checker::on && !is_view(schema_)) {
      std::vector<Touch> touches;
      for (const auto& operand : operands_) add_touch(touches, operand.tensor, operand.writes);
      for (size_t i = 0; i < results.size(); ++i)
        if (schema_.returns()[i].alias_info() == nullptr)
          for_each_on_device(results[i], [&](const at::Tensor& tensor) { add_touch(touches, tensor, true); });
      checker::access(schema_.name(), touches, current_stream());
    }
    if (recorder::on) recorder::kernel(c10::toString(schema_.operator_name()), arguments_, results);
  }

  // FLOPs of a matrix product; 0 for all other operators.
  double flops(const std::vector<IValue>& results) const {
    static const std::map<std::string, size_t> products{{"aten::mm", 0}, {"aten::bmm", 0}, {"aten::addmm", 1}, {"aten::baddbmm", 1}};
    const auto found = products.find(schema_.name());
    if (found == products.end()) return 0;
    return 2.0 * static_cast<double>(results[0].toTensor().numel() * arguments_[found->second].toTensor().size(-1));
  }

  // Bytes moved, if each argument is read once and each result written once.
  double moved_bytes(const std::vector<IValue>& results) const {
    double bytes = 0;
    for (const auto& operand : operands_) bytes += (operand.reads + operand.writes) * held_bytes(operand.tensor);
    for (size_t i = 0; i < results.size(); ++i)
      if (schema_.returns()[i].alias_info() == nullptr)
        for_each_on_device(results[i], [&](const at::Tensor& tensor) { bytes += held_bytes(tensor); });
    return bytes;
  }

  static constexpr size_t kWordBytes = 1 << 20;  // [Note: Words]

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::vector<IValue> arguments_{};
  std::vector<Operand> operands_{};
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (auto& result : Call(op, stack).run()) stack->push_back(std::move(result));
}

void report_copy(const char* name, const at::Tensor& from, const at::Tensor& to) {
  if (checker::on) {
    std::vector<Touch> touches;
    add_touch(touches, from, false);
    add_touch(touches, to, true);
    checker::access(name, touches, current_stream());
  }
  if (recorder::on) recorder::kernel(name, {from, to}, {});
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool down = !on_device(to), up = !on_device(from);
  const bool to_host = down || in_host_memory(to), from_host = up || in_host_memory(from);
  if (!to_host || !from_host)
    report_copy(to_host ? "copy to the host" : from_host ? "copy from the host" : "aten::copy_", from, to);
  if (to_host != from_host)
    wall::copy(current_stream(), from_host, static_cast<int64_t>(to.nbytes()));
  else
    take_time(to_host, 0, held_bytes(from) + held_bytes(to));
  const at::Tensor& host = down ? to : from;
  if ((down || up) && to.numel() != 0 && !(non_blocking && is_pinned(host.storage().data()))) {
    if (down) checker::host_read("copy to the host", current_stream(), static_cast<int64_t>(to.nbytes()));
    if (up) checker::host_wait("copy from memory that is not pinned", current_stream());
    host_waits_for(current_stream());
  }
  const at::DisableRecordFunctionGuard by_the_device;  // it is not the host's operator
  const bool known = up || is_known(from);
  if (known && (down || is_backed(to))) {
    (down ? to : on_host(to)).copy_(up ? from : on_host(from));
  } else if (down) {
    to.zero_();
  }
  if (!down) wrote(to, known);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  report_copy("aten::_local_scalar_dense", tensor, {});
  checker::host_read("aten::_local_scalar_dense", current_stream(), static_cast<int64_t>(tensor.nbytes()));
  host_waits_for(current_stream());
  return is_known(tensor) ? on_host(tensor).item() : at::Scalar(0);
}

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, device_memory(), keys, at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, device_memory(), keys, at::dtype_or_default(dtype));
}

at::Tensor empty_like(
    const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  const InHostMemory result_too(in_host_memory(self));
  return at::native::empty_like(self, dtype, layout, device, pin, format);
}

at::Tensor as_strided(
    const at::Tensor& self, at::SymIntArrayRef sizes, at::SymIntArrayRef strides, std::optional<at::SymInt> offset) {
  return at::cpu::as_strided_symint(self, sizes, strides, std::move(offset));
}

at::Tensor view(const at::Tensor& self, at::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor reshape_alias(const at::Tensor& self, at::SymIntArrayRef sizes, at::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

const at::Tensor& resize(const at::Tensor& self, at::SymIntArrayRef symbolic, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t needed = static_cast<size_t>(self.storage_offset() + self.numel()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) resize_storage(*storage, needed);
  return self;
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::cpu::set_(self, std::move(storage), offset, sizes, strides);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return at::cpu::set_(self, std::move(storage), 0, {length}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return at::cpu::set_(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

void record_stream(at::Tensor& self, at::Stream stream) {
  use_on_stream(self.storage().data(), static_cast<int>(stream.id()));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("empty_like", empty_like);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
}

// Torch composes these from others if a device has no kernel for them. The simulated kinds of device have kernels.
bool has_kernel_of_its_own(const c10::OperatorHandle& op) {
  static const std::set<std::string> names{"aten::convolution", "aten::convolution_backward"};
  if (op.operator_name().name.rfind("aten::_foreach_", 0) == 0 || names.count(op.operator_name().name) != 0) return true;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

// Whether an operator on the host reads and writes no values: it makes new tensors, views, or asks about one.
bool passes_over(const c10::FunctionSchema& schema) {
  static const std::set<std::string> names{
      "aten::empty_like", "aten::zeros_like", "aten::ones_like",  "aten::new_empty", "aten::new_empty_strided",
      "aten::new_zeros",  "aten::is_pinned",  "aten::set_", "aten::resize_"};
  bool asks = schema.returns().empty();  // and changes no tensor
  for (const auto& argument : schema.arguments()) asks = asks && !writes(argument);
  return asks || is_view(schema) || names.count(schema.name()) != 0;
}

// Reports the host's operators on memory that the device copies from and to. The device's operators report themselves.
std::unique_ptr<at::ObserverContext> on_the_host(const at::RecordFunction& function) {
  const auto inputs = function.inputs();
  bool device = false;
  std::vector<std::pair<at::Tensor, size_t>> pinned;
  for (size_t i = 0; i < inputs.size(); ++i) {
    device = device || (inputs[i].isDevice() && inputs[i].toDevice().type() == c10::DeviceType::PrivateUse1);
    changed(inputs[i], [&](const at::Tensor& tensor) {
      device = device || on_device(tensor);
      if (tensor.defined() && tensor.device().is_cpu() && tensor.has_storage() && is_pinned(tensor.storage().data()))
        pinned.emplace_back(tensor, i);
      return tensor;
    });
  }
  if (device || pinned.empty()) return nullptr;
  const auto schema = function.operator_schema();
  if (!schema || passes_over(*schema)) return nullptr;
  std::vector<Touch> touches;
  for (const auto& [tensor, i] : pinned)
    add_touch(touches, tensor, i < schema->arguments().size() && writes(schema->arguments()[i]));
  checker::access(schema->name(), touches, kHost);
  return nullptr;
}

}  // namespace

void checker::watch_host(bool on) {
  static at::CallbackHandle handle = 0;
  if (on && !is_virtual()) handle = at::addGlobalCallback(at::RecordFunctionCallback(&on_the_host).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  if (!on && handle != 0) at::removeCallback(std::exchange(handle, 0));
}

void register_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || !op->hasSchema()) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) || is_view(op->schema())) continue;
    if (has_kernel_of_its_own(*op))
      library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  const size_t kept = std::min(storage.nbytes(), bytes);
  c10::DataPtr fresh = device_memory()->allocate(bytes);
  Block* before = block_at(storage.data());
  Block* after = block_at(fresh.get());
  if (kept != 0) {
    const bool known = !is_virtual() || (before->known && after->small);
    if (known) std::memcpy(fresh.get(), storage.data(), kept);
    after->known = known && kept == bytes;
    checker::access("resize_", {{before, 0, kept, false}, {after, 0, kept, true}}, current_stream());
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

}  // namespace simdev
