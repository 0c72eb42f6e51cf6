// What only the caching allocator knows: handed on as it is, but for its limit, which pages share.
#include "allocator.h"

namespace lowtide {

c10::DeleterFnPtr Allocator::raw_deleter() const { return behind_->raw_deleter(); }
void Allocator::copy_data(void *to, const void *from, std::size_t bytes) const {
  behind_->copy_data(to, from, bytes);
}
void Allocator::init(int devices) { behind_->init(devices); }
bool Allocator::initialized() { return behind_->initialized(); }
double Allocator::getMemoryFraction(c10::DeviceIndex device) {
  return pages_.fraction(device);
}
void Allocator::setMemoryFraction(double fraction, c10::DeviceIndex device) {
  pages_.set_fraction(fraction, device);
}
std::vector<native::StreamSegmentSize> Allocator::getExpandableSegmentSizes(
    c10::DeviceIndex device) {
  return behind_->getExpandableSegmentSizes(device);
}
void Allocator::enable(bool value) { behind_->enable(value); }
bool Allocator::isEnabled() const { return behind_->isEnabled(); }
void Allocator::releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) {
  behind_->releasePool(device, pool);
}
int Allocator::getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) {
  return behind_->getPoolUseCount(device, pool);
}
void Allocator::createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                                   std::shared_ptr<native::CUDAAllocator> allocator) {
  behind_->createOrIncrefPool(device, pool, std::move(allocator));
}
void Allocator::setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use) {
  behind_->setUseOnOOM(device, pool, use);
}
void Allocator::setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) {
  behind_->setNoSplit(device, pool);
}
bool Allocator::checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                         const std::unordered_set<void *> &expected) {
  return behind_->checkPoolLiveAllocations(device, pool, expected);
}
std::shared_ptr<void> Allocator::getIpcDevPtr(std::string handle) {
  return behind_->getIpcDevPtr(std::move(handle));
}
bool Allocator::isHistoryEnabled() { return behind_->isHistoryEnabled(); }
void Allocator::recordAnnotation(
    const std::vector<std::pair<std::string, std::string>> &metadata) {
  behind_->recordAnnotation(metadata);
}
void Allocator::pushCompileContext(std::string &metadata) {
  behind_->pushCompileContext(metadata);
}
void Allocator::popCompileContext() { behind_->popCompileContext(); }
void Allocator::setUserMetadata(const std::string &metadata) {
  behind_->setUserMetadata(metadata);
}
std::string Allocator::getUserMetadata() { return behind_->getUserMetadata(); }
void Allocator::attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) {
  behind_->attachOutOfMemoryObserver(std::move(observer));
}
void Allocator::attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) {
  behind_->attachAllocatorTraceTracker(std::move(tracker));
}
void Allocator::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex to) {
  behind_->enablePeerAccess(device, to);
  TORCH_CHECK(pages_.let_read(to, device), "lowtide: device ", static_cast<int>(device),
              " cannot read what lies in pages of device ", static_cast<int>(to),
              ": leave the fit before copying between them");
}
cudaError_t Allocator::memcpyAsync(void *to, int to_device, const void *from, int from_device,
                                   size_t bytes, cudaStream_t stream, bool peer) {
  // What is no memory of cudaMalloc's needs to be told whose it is.
  if (!peer && to_device != from_device && (pages_.any(to_device) || pages_.any(from_device)))
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
  return behind_->memcpyAsync(to, to_device, from, from_device, bytes, stream, peer);
}
std::shared_ptr<native::AllocatorState> Allocator::getCheckpointState(c10::DeviceIndex device,
                                                                      c10::MempoolId_t id) {
  return behind_->getCheckpointState(device, id);
}
native::CheckpointDelta Allocator::setCheckpointPoolState(
    c10::DeviceIndex device, std::shared_ptr<native::AllocatorState> state) {
  return behind_->setCheckpointPoolState(device, std::move(state));
}
std::string Allocator::name() { return behind_->name(); }
std::pair<size_t, size_t> Allocator::getMemoryInfo(c10::DeviceIndex device) {
  return behind_->getMemoryInfo(device);
}
#ifdef LOWTIDE_HAS_markCaptureBegin
void Allocator::markCaptureBegin(c10::DeviceIndex device) { behind_->markCaptureBegin(device); }
void Allocator::markCaptureEnd(c10::DeviceIndex device) { behind_->markCaptureEnd(device); }
#endif
#ifdef LOWTIDE_HAS_getContextForPointer
std::shared_ptr<c10::GatheredContext> Allocator::getContextForPointer(const void *block) {
  return behind_->getContextForPointer(block);
}
#endif
#ifdef LOWTIDE_HAS_attachOomRejectionObserver
void Allocator::attachOomRejectionObserver(native::OomRejectionObserver observer) {
  behind_->attachOomRejectionObserver(std::move(observer));
}
#endif
#ifdef LOWTIDE_HAS_allocateWithAddress
c10::DataPtr Allocator::allocateWithAddress(size_t bytes, void *address) {
  return behind_->allocateWithAddress(bytes, address);
}
#endif

}  // namespace lowtide
