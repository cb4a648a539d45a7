// As much of a CUDA device as PyTorch asks for when it traces fake CUDA tensors: one device, which does nothing.
// Loaded before a CPU build of PyTorch (analysis/gpu/traced.py).
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::EventFlag;
using c10::Stream;

const Device only{DeviceType::CUDA, 0};

struct Guard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
    Device getDevice() const override { return only; }
    Device exchangeDevice(Device) const override { return only; }
    Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only); }
    Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, only); }
    DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
    void block(void*, const Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void destroyEvent(void*, const DeviceIndex) const noexcept override {}
    bool queryStream(const Stream&) const override { return true; }
    void synchronizeStream(const Stream&) const override {}
    void synchronizeEvent(void*) const override {}
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);

}  // namespace

namespace at {

// PyTorch looks for hooks of this name
struct CUDAHooks : CUDAHooksInterface {
    explicit CUDAHooks(CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return 1; }
    DeviceIndex getCurrentDevice() const override { return 0; }
    DeviceIndex current_device() const override { return 0; }
    DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
    DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
    void setCurrentDevice(DeviceIndex) const override {}
    int getNumGPUs() const override { return 1; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
