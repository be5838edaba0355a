// Queue the decoding of a slab: fill its records, copy bytes and records up, launch the decoders.
#include <algorithm>

#include "device.hpp"

namespace lc {
namespace {

struct Record {  // `Stream` of decode.cuh
    i64 source, source_nbytes, target, target_nbytes;
    int32_t chunk, codec;
};
struct Order {  // `Order` of blosc.cu
    i64 source, target, nbytes;
    u32 block_nbytes, typesize;
    int32_t mode, chunk;
};
static_assert(sizeof(Record) == RECORD_NBYTES && sizeof(Order) == RECORD_NBYTES);

}  // namespace

void Device::launch_decoders(Slab &slab) {
    const lc_decode_plan &plan = *slab.plan;
    const i64 count = static_cast<i64>(slab.chunks.size());
    u8 *memory = slab.words + table_nbytes_;
    i64 *counters = reinterpret_cast<i64 *>(memory);
    std::fill(counters, counters + COUNTERS, 0);
    counters[0] = plan.counter ? count : 0;
    Record *records = reinterpret_cast<Record *>(memory + 8 * COUNTERS);
    i64 *offsets = reinterpret_cast<i64 *>(records + count);
    Order *orders = reinterpret_cast<Order *>(offsets + count);
    for (i64 n = 0; n < count; ++n) {
        const StagedChunk &chunk = slab.chunks[static_cast<size_t>(n)];
        const i64 offset = n * plan.chunk_stride;
        records[n] = {chunk.source,
                      chunk.nbytes - plan.checksum_nbytes,
                      offset,
                      plan.target_nbytes,
                      static_cast<int32_t>(n),
                      static_cast<int32_t>(plan.codec)};
        offsets[n] = offset;
        orders[n] = {};
        if (plan.shuffle)
            orders[n] = {offset,
                         offset,
                         plan.chunk_nbytes,
                         static_cast<u32>(plan.chunk_nbytes),
                         static_cast<u32>(plan.shuffle),
                         1,
                         static_cast<int32_t>(n)};
    }
    const i64 records_nbytes = 8 * COUNTERS + count * (2 * RECORD_NBYTES + 8);
    u8 *zeros = memory + records_nbytes_;
    std::memset(zeros, 0, static_cast<size_t>(4 * count));
    const lc_decode_layout &layout = plan.layouts[count];
    const i64 stored = slab.padded_stored_nbytes();
    const DevicePointer words = slab.device + static_cast<DevicePointer>(stored + layout.words);
    const DevicePointer status = slab.device + static_cast<DevicePointer>(stored + layout.status);
    copy_stored(slab, plan.stored + slab.used + MARGIN);
    driver_.copy_up(words, memory, records_nbytes, slab.stream);
    driver_.copy_up(status, zeros, 4 * count, slab.stream);
    mark(slab, 1);
    for (i64 n = 0; n < layout.launches; ++n) {
        const lc_launch &launch = plan.launches[count * plan.launch_count + n];
        u64 values[LC_MAX_ARGUMENTS];
        void *arguments[LC_MAX_ARGUMENTS];
        for (i64 k = 0; k < launch.argument_count; ++k) {
            const auto &rule = launch.arguments[k];
            values[k] = static_cast<u64>(rule.constant) + static_cast<u64>(rule.base) * slab.device +
                        static_cast<u64>(rule.status) * status + static_cast<u64>(rule.stored * stored);
            arguments[k] = &values[k];
        }
        driver_.launch(launch.function, launch.grid_x, launch.grid_y, launch.block, launch.shared, slab.stream,
                       arguments);
    }
}

}  // namespace lc
