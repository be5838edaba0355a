// Tables of the scatter kernels: the source and target of each row of a slab.
#include <algorithm>
#include <bit>

#include "device.hpp"

namespace lc {
namespace {

// As in scatter.cu.
constexpr i64 BLOCK = 256, PER_THREAD = 8;

// The table of one launch: the rows of a slab with one conversion and rank. The table has a header for each output,
// with strides and fill value, and then an entry for each row. A kernel that copies without conversion may copy units
// of several elements.
class Table {
public:
    Table(const Slab &slab, const lc_scatter &scatter, u64 number)
        : rows_(slab.rows), scatter_(scatter), number_(number), inner_(scatter.axes[scatter.rank - 1]) {}

    // Number the outputs of the rows, and find the largest unit that divides all strides, offsets and contiguous runs.
    void analyze();
    // Write headers and rows; returns the end of the table.
    i64 *write(i64 *to);
    void launch(const Driver &driver, DevicePointer source, const i64 *table, DevicePointer words, Stream stream) const;

private:
    bool contains(const Row &row) const { return row.batch->scatter == &scatter_; }
    void add_output(const Row &row);

    const std::vector<Row> &rows_;
    const lc_scatter &scatter_;
    u64 number_;
    i64 inner_;  // the axis along which threads are adjacent
    i64 itemsize_ = 0, target_itemsize_ = 0;
    i64 bits_ = 16;  // all addresses, strides and lengths combined by OR: the lowest set bit is the largest unit
    i64 unit_ = 0;  // bytes that a thread copies at a time
    i64 count_ = 0, largest_ = 0;  // number of rows; units of the largest row
    bool widens_ = true;  // whether all rows are contiguous along the inner axis, so that units may exceed elements
    std::vector<const Row *> outputs_;  // one row of each output
    const i64 *headers_ = nullptr, *first_ = nullptr;  // the first header and the first row
};

void Table::add_output(const Row &row) {
    const Geometry &geometry = *row.batch->regions.geometry;
    const i64 *strides = row.batch->regions.strides.data() + row.region * geometry.rank;
    itemsize_ = geometry.itemsize;
    target_itemsize_ = dtype_nbytes(row.batch->regions.conversion.target);
    for (i64 k = 0; k + 1 < scatter_.rank; ++k)
        bits_ |= geometry.chunk_strides[scatter_.axes[k]] | strides[scatter_.axes[k]];
    widens_ = widens_ && geometry.chunk_strides[inner_] == itemsize_;
    row.batch->headers[static_cast<size_t>(row.region)] = {number_, static_cast<u32>(outputs_.size()),
                                                           strides[inner_] == itemsize_};
    outputs_.push_back(&row);
}

void Table::analyze() {
    for (const Row &row : rows_) {
        if (!contains(row)) continue;
        const OutputHeader &header = row.batch->headers[static_cast<size_t>(row.region)];
        if (header.slab != number_) add_output(row);
        widens_ = widens_ && (header.is_contiguous || row.extent[inner_] == 1);
        bits_ |= reinterpret_cast<i64>(row.target) | row.extent[inner_] * itemsize_ | std::max<i64>(row.source, 0);
        ++count_;
    }
    unit_ = scatter_.is_copy && widens_ ? std::max(itemsize_, bits_ & -bits_) : itemsize_;
}

i64 *Table::write(i64 *to) {
    const i64 rank = scatter_.rank, target_unit = scatter_.is_copy ? unit_ : target_itemsize_;
    headers_ = to;
    for (const Row *row : outputs_) {
        const Regions &regions = row->batch->regions;
        const i64 *strides = regions.strides.data() + row->region * regions.geometry->rank;
        for (i64 k = 0; k < rank; ++k) {
            const bool is_widened = k == rank - 1 && unit_ > itemsize_;
            to[k] = is_widened ? 1 : regions.geometry->chunk_strides[scatter_.axes[k]] / unit_;
            to[rank + k] = is_widened ? 1 : strides[scatter_.axes[k]] / target_unit;
        }
        std::memcpy(to + 2 * rank, regions.fill, sizeof regions.fill);
        to += 2 * rank + 2;
    }
    first_ = to;
    const int shift = std::countr_zero(static_cast<u64>(unit_));  // sizes of elements and units are powers of two
    const int widening = shift - std::countr_zero(static_cast<u64>(itemsize_));
    for (const Row &row : rows_) {
        if (!contains(row)) continue;
        to[0] = row.source < 0 ? -1 : row.source >> shift;
        to[1] = reinterpret_cast<i64>(row.target);
        to[2] = row.batch->headers[static_cast<size_t>(row.region)].number;
        i64 units = 1;
        for (i64 k = 0; k < rank; ++k) {
            to[3 + k] = row.extent[scatter_.axes[k]] >> (k == rank - 1 ? widening : 0);
            units *= to[3 + k];
        }
        largest_ = std::max(largest_, units);
        to += 3 + rank;
    }
    return to;
}

void Table::launch(const Driver &driver, DevicePointer source, const i64 *table, DevicePointer words,
                   Stream stream) const {
    const i64 blocks = (largest_ + BLOCK * PER_THREAD - 1) / (BLOCK * PER_THREAD);
    u64 values[3] = {source, words + static_cast<u64>(8 * (headers_ - table)),
                     words + static_cast<u64>(8 * (first_ - table))};
    u32 per_box = static_cast<u32>(blocks);
    void *arguments[4] = {&values[0], &values[1], &values[2], &per_box};
    const i64 function = scatter_.functions[std::countr_zero(static_cast<u64>(unit_))];
    driver.launch(function, blocks * count_, 1, BLOCK, 0, stream, arguments);
}

}  // namespace

// Write the tables of the scatter kernels, copy them to the device, and launch one kernel for each conversion and rank.
void Device::write_scatter(Slab &slab, DevicePointer source, DevicePointer words) {
    std::vector<Table> tables;
    std::vector<const lc_scatter *> seen;
    const lc_scatter *last = nullptr;
    for (const Row &row : slab.rows) {
        if (row.batch->scatter == last) continue;
        last = row.batch->scatter;
        if (std::find(seen.begin(), seen.end(), last) != seen.end()) continue;
        seen.push_back(last);
        tables.emplace_back(slab, *last, slabs_begun_);
    }
    i64 *const table = reinterpret_cast<i64 *>(slab.words), *to = table;
    for (Table &launch_table : tables) {
        launch_table.analyze();
        to = launch_table.write(to);
        to += (to - table) % 2;  // headers begin at multiples of 16 bytes, since they hold fill values of 16 bytes
    }
    driver_.copy_up(words, table, 8 * (to - table), slab.stream);
    for (const Table &launch_table : tables) launch_table.launch(driver_, source, table, words, slab.stream);
}

}  // namespace lc
