// Torch's interfaces of a device: a guard for streams and events, and hooks for generators and pinned memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "clocks.h"
#include "generator.h"
#include "memory.h"

namespace simdev {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Stream as_stream(int stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, 0), static_cast<c10::StreamId>(stream));
}

int number(const c10::Stream& stream) { return static_cast<int>(stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return as_stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool high) const override { return as_stream(new_stream(high)); }
  c10::Stream getNewStream(c10::Device, int priority) const override { return as_stream(new_stream(priority < 0)); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return as_stream(exchange_stream(number(stream))); }
  bool queryStream(const c10::Stream& stream) const override {
    if (!wall::is_over(wall::mark(number(stream)))) return false;
    host_waits_for(number(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    checker::host_wait("synchronize a stream", number(stream));
    host_waits_for(number(stream));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    checker::host_wait("synchronize the device", current_stream());
    host_waits_for_all();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    simdev::record(*static_cast<Event*>(*event), number(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) simdev::wait(number(stream), *static_cast<Event*>(event));
  }
  // The caller may rely on "true" as on a wait. Without a wall clock, everything that was issued is done.
  bool queryEvent(void* event) const override {
    if (event != nullptr && !wall::is_over(static_cast<Event*>(event)->mark)) return false;
    if (event != nullptr) host_waits_for(*static_cast<Event*>(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    checker::host_wait("synchronize an event", current_stream());
    if (event != nullptr) host_waits_for(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return 1e3 * wall::seconds_between(static_cast<Event*>(from)->mark, static_cast<Event*>(to)->mark);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_on_stream(data.get(), number(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A generator that draws from one of the host's; see `host_generator`.
struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator(at::Generator host) : GeneratorImpl({kType, 0}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new DeviceGenerator(host.clone()); }

  at::Generator host;
};

}  // namespace

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
  return generator;
}

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  c10::Device getDeviceFromPtr(void*) const override { return {kType, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

at::Generator host_generator(const std::optional<at::Generator>& generator) {
  const at::Generator& found = generator && generator->defined() ? *generator : default_generator();
  const auto* device = dynamic_cast<const DeviceGenerator*>(found.unsafeGetGeneratorImpl());
  return device == nullptr ? found : device->host;
}

void register_hooks() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace simdev
