// Rows of slabs that copy from chunks kept on the device, without a read of their files.
#pragma once

#include "device.hpp"

namespace lc {

// Collects the boxes of kept chunks, and commits them to slabs.
class KeptRows {
public:
    KeptRows(Wave &wave, Device &device, u32 chunks);
    ~KeptRows();
    KeptRows(const KeptRows &) = delete;
    KeptRows &operator=(const KeptRows &) = delete;

    // Add the boxes of a chunk, and take over the pin of its slot. Throws DriverError.
    void add(const WantedChunk &chunk, KeptSlot &slot);
    // Commit the rows that were added to a slab. Throws DriverError.
    void commit();

private:
    Wave &wave_;
    Device &device_;
    std::vector<WantedBox *> boxes_;
    std::vector<Row> rows_;
    KeptUse use_;
    std::vector<KeptSlot *> unread_;  // slots of chunks that no job wants any more; unpinned at the end
};

}  // namespace lc
