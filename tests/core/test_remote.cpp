// Arrays in an object store, whose requests a function of the test carries out from files; some late, wrong or never.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>

#include "stores.hpp"

namespace {

// What the stand-in for a server does, and has seen.
struct Server {
    std::atomic<int64_t> requests{0}, under_way{0}, most{0};
    std::atomic<int64_t> fail_at{0};    // number of the request that fails
    std::atomic<int64_t> change_at{0};  // number of the request from which on objects are other ones
    std::atomic<int64_t> cut_at{0};     // number of the request that brings too little
    std::atomic<int64_t> gather{0};     // requests that are waited for before any is answered
    std::atomic<bool> held{false}, tells{true}, sized{true};
    std::mutex mutex;
    std::map<int64_t, std::string> lent;
} server;

// Nothing is lent behind the end of all requests.
bool all_is_given_back() {
    const std::lock_guard lock(server.mutex);
    return server.lent.empty();
}

std::string bytes_of(const char *path, bool &found) {
    std::ifstream file(path, std::ios::binary);
    found = file.is_open();
    return {std::istreambuf_iterator<char>(file), {}};
}

void wait_until(const std::function<bool()> &over) {
    for (int n = 0; n < 20'000 && !over(); ++n) usleep(500);
}

void respond(lc_fetch *request, int64_t number) {
    bool found;
    const std::string bytes = bytes_of(request->key, found);
    if (!found) {
        request->code = LC_MISSING;
        return;
    }
    if (number == server.fail_at) {
        std::strcpy(request->text, "503");
        return;
    }
    request->code = LC_OK;
    request->size = static_cast<int64_t>(bytes.size());
    if (server.tells) request->version[0] = server.change_at && number >= server.change_at ? 2 : 1;
    if (!request->nbytes) return;
    int64_t offset = request->offset, nbytes = request->nbytes;
    if (nbytes < 0) nbytes = request->size;
    if (offset < 0) offset = std::max<int64_t>(0, request->size - nbytes);
    nbytes = std::min(nbytes, request->size - offset);
    if (!server.sized && request->nbytes > 0) request->size = -1;
    if (nbytes > request->capacity) return;
    if (number == server.cut_at) nbytes /= 2;
    const std::lock_guard lock(server.mutex);
    const std::string &part = server.lent[number] =
        bytes.substr(static_cast<size_t>(offset), static_cast<size_t>(nbytes));
    request->loan = number;
    request->got = nbytes;
    request->address = reinterpret_cast<int64_t>(part.data());
}

void carry_out(lc_fetch *request) {
    {
        const std::lock_guard lock(server.mutex);
        for (int64_t n = 0; n < request->returned_count; ++n) CHECK(server.lent.erase(request->returned[n]) == 1);
    }
    if (!request->key) return;
    CHECK(request->store == 7);
    const int64_t number = ++server.requests, now = ++server.under_way;
    for (int64_t most = server.most; now > most && !server.most.compare_exchange_weak(most, now);) {
    }
    if (const int64_t gather = server.gather) wait_until([&] { return server.most >= gather; });
    wait_until([] { return !server.held; });
    usleep(static_cast<useconds_t>(number % 7 * 50));
    respond(request, number);
    --server.under_way;
}

struct RemoteStore : Store {
    using Store::Store;
    RemoteStore(Random &random, bool sharded, int64_t longest = 40) : Store(random, sharded, longest) { number = 7; }
};

}  // namespace

TEST(remote_jobs) {
    lc_set_reads(5);
    lc_set_fetch(carry_out);
    for (uint64_t seed = 0; seed < 8; ++seed) {
        Random random(seed);
        RemoteStore store(random, seed % 2);
        server.tells = seed % 3 != 0;
        server.sized = server.tells.load();
        lc_reader *reader = new_reader(draw(random, 1, 8));
        for (int round = 0; round < 3; ++round) {
            Jobs jobs(store, random, draw(random, 0, 20), draw(random, 0, 1));
            CHECK(jobs.submit(reader) == 0);
            for (int64_t code : jobs.settle()) CHECK(code == LC_OK);
        }
        close_reader(reader);
    }
    CHECK(server.most <= 5);
    CHECK(server.under_way == 0);
    CHECK(all_is_given_back());
    server.tells = true;
    server.sized = true;
}

// Where the metadata are missing, too, chunks are no fill values.
TEST(an_array_that_is_gone) {
    lc_set_fetch(carry_out);
    for (int sharded = 0; sharded < 2; ++sharded) {
        Random random(2);
        RemoteStore store(random, sharded);
        lc_reader *reader = new_reader();
        for (int64_t expected : {int64_t{LC_OK}, int64_t{LC_GONE}}) {
            for (const auto &entry : std::filesystem::directory_iterator(store.folder.path))
                if (expected == LC_GONE || entry.path() != store.metadata) std::filesystem::remove(entry.path());
            store.voxels.assign(store.voxels.size(), FILL);
            Jobs jobs(store, random, 3);
            CHECK(jobs.submit(reader) == 0);
            const std::vector<int64_t> codes = jobs.settle();
            for (size_t n = 0; n < codes.size(); ++n)
                CHECK(codes[n] == (jobs.outputs[n].empty() ? int64_t{LC_OK} : expected));
        }
        close_reader(reader);
    }
}

// Many requests are under way, on however few cores.
TEST(requests_have_threads_of_their_own) {
    constexpr int64_t REQUESTS = 32;
    lc_set_fetch(carry_out);
    Random random(3);
    RemoteStore store(random, false);
    for (int a = 0; a < RANK; ++a) {
        store.shape[a] = 10;
        store.chunk[a] = store.geometry.chunk_shape[a] = 2;
    }
    store.voxels.assign(1000, FILL);
    std::filesystem::remove_all(store.folder.path);
    std::filesystem::create_directory(store.folder.path);
    write_file(store.metadata, "{}");
    store.write(random);  // an eighth of 125 chunks is missing
    server.gather = REQUESTS;
    lc_reader *reader = new_reader();
    Jobs jobs(store, random, 1);
    for (int a = 0; a < RANK; ++a) {
        jobs.start[a] = 0;
        jobs.stop[a] = 10;
    }
    jobs.strides = {200, 20, 2};
    jobs.outputs[0].assign(1000, 0);
    jobs.address[0] = reinterpret_cast<int64_t>(jobs.outputs[0].data());
    CHECK(jobs.submit(reader) == 0);
    CHECK(jobs.settle()[0] == LC_OK);
    CHECK(server.most >= REQUESTS);
    close_reader(reader);
}

TEST(requests_fail_once) {
    lc_set_fetch(carry_out);
    Random random(1);
    for (int sharded = 0; sharded < 2; ++sharded) {
        RemoteStore store(random, sharded, 20);
        for (int kind = 0; kind < 3; ++kind)
            for (int64_t nth = 1; nth < 16; ++nth) {
                server.requests = 0;
                server.fail_at = kind == 0 ? nth : 0;
                server.cut_at = kind == 1 ? nth : 0;
                server.change_at = kind == 2 ? nth : 0;
                lc_reader *reader = new_reader();
                Jobs jobs(store, random, 6);
                CHECK(jobs.submit(reader) == 0);
                for (int64_t code : jobs.settle()) {
                    // An index that is cut is no index; raw chunks are read by one request, which no other one contradicts.
                    if (kind == 0) CHECK(code == LC_OK || code == LC_REMOTE);
                    if (kind == 1) CHECK(code == LC_OK || code == LC_SHORT || (sharded && code == LC_INDEX));
                    if (kind == 2) CHECK(code == LC_OK || (sharded && code == LC_REPLACED));
                }
                close_reader(reader);
            }
    }
    server.fail_at = server.cut_at = server.change_at = 0;
    CHECK(all_is_given_back());
}

TEST(an_object_that_changes_between_two_requests) {
    lc_set_fetch(carry_out);
    Random random(5);
    RemoteStore store(random, true, 20);
    lc_reader *reader = new_reader();
    int64_t replaced = 0;
    for (int round = 0; round < 20 && !replaced; ++round) {
        Jobs jobs(store, random, 1);
        server.requests = 0;
        server.change_at = 2;  // behind the first index
        CHECK(jobs.submit(reader) == 0);
        for (int64_t code : jobs.settle()) {
            CHECK(code == LC_OK || code == LC_REPLACED);
            replaced += code == LC_REPLACED;
        }
    }
    CHECK(replaced);
    server.change_at = 0;
    Jobs jobs(store, random, 4);
    CHECK(jobs.submit(reader) == 0);
    for (int64_t code : jobs.settle()) CHECK(code == LC_OK);
    close_reader(reader);
}

TEST(cancelled_and_closed_while_requests_are_under_way) {
    lc_set_fetch(carry_out);
    for (uint64_t seed = 0; seed < 4; ++seed) {
        Random random(seed);
        RemoteStore store(random, seed % 2);
        lc_reader *reader = new_reader();
        Jobs jobs(store, random, 12), others(store, random, 5);
        server.requests = 0;
        server.held = true;
        CHECK(jobs.submit(reader) == 0);
        CHECK(others.submit(reader) == 0);
        wait_until([] { return server.under_way > 0; });
        for (size_t n = 0; n < jobs.jobs.size(); n += 2) lc_job_cancel(jobs.jobs[n]);
        if (seed > 1) lc_reader_close(reader);
        std::thread later([] {
            usleep(2000);
            server.held = false;
        });
        for (int64_t code : jobs.settle()) CHECK(code == LC_OK || code == LC_CANCELLED);
        for (int64_t code : others.settle()) CHECK(code == LC_OK || (seed > 1 && code == LC_CANCELLED));
        later.join();
        close_reader(reader);
        CHECK(server.under_way == 0);
    }
}

TEST(a_remote_chunk_of_another_size) {
    lc_set_fetch(carry_out);
    Random random(9);
    RemoteStore store(random, false, 20);
    for (const auto &entry : std::filesystem::directory_iterator(store.folder.path))
        if (entry.path().filename() != "zarr.json") std::filesystem::resize_file(entry.path(), entry.file_size() + 1);
    lc_reader *reader = new_reader();
    Jobs jobs(store, random, 20);
    CHECK(jobs.submit(reader) == 0);
    int64_t wrong = 0;
    for (int64_t code : jobs.settle()) {
        CHECK(code == LC_OK || code == LC_SIZE);
        wrong += code == LC_SIZE;
    }
    CHECK(wrong);
    close_reader(reader);
}
