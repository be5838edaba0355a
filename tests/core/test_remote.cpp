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
    std::atomic<int64_t> cut_at{0};     // number of the request that brings too little; all if below 0
    std::atomic<int64_t> gather{0};     // requests that are waited for before any is answered
    std::atomic<int64_t> broken{0};     // so many answers break off
    std::atomic<int64_t> usual_ms{0};   // of an answer
    std::atomic<int64_t> late_each{0}, late_ms{0};  // one answer of so many comes late
    std::atomic<bool> held{false}, tells{true}, sized{true}, late_is_wrong{false};
    std::atomic<bool> second_fails{false};  // of two requests for the same bytes at the same time
    std::map<std::pair<std::string, int64_t>, int> now;           // requests under way, by their bytes
    std::map<std::pair<std::string, int64_t>, int64_t> answered;  // number of the last one answered, by its bytes
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

// A reader that is closed does not wait for requests that were sent twice.
void check_all_answered() {
    wait_until([] { return server.under_way == 0; });
    CHECK(server.under_way == 0);
}

bool is_late(int64_t number) { return server.late_each && number % server.late_each == server.late_each / 2; }

void respond(lc_fetch *request, int64_t number, bool is_wrong) {
    bool found;
    const std::string bytes = bytes_of(request->key, found);
    if (!found) {
        request->code = LC_MISSING;
        return;
    }
    if (number == server.fail_at || --server.broken >= 0) {
        std::strcpy(request->text, "503");
        if (number != server.fail_at) request->code = LC_BROKEN;
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
    if (number == server.cut_at || server.cut_at < 0) nbytes /= 2;
    const std::lock_guard lock(server.mutex);
    std::string &part = server.lent[number] = bytes.substr(static_cast<size_t>(offset), static_cast<size_t>(nbytes));
    if (is_wrong) part.assign(part.size(), 'x');
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
    const auto bytes = std::pair(std::string(request->key), request->offset);
    bool is_second;
    {
        const std::lock_guard lock(server.mutex);
        is_second = ++server.now[bytes] > 1 && server.second_fails;
    }
    usleep(static_cast<useconds_t>(number % 7 * 50 + 1000 * (is_late(number) ? server.late_ms : server.usual_ms)));
    bool is_wrong = false;
    if (is_late(number) && server.late_is_wrong) {
        const std::lock_guard lock(server.mutex);
        is_wrong = server.answered[bytes] > number;
    }
    if (is_wrong) usleep(100'000);  // until the reader has the other answer on a busy machine, too
    if (!is_second) respond(request, number, is_wrong);
    const std::lock_guard lock(server.mutex);
    server.answered[bytes] = std::max(server.answered[bytes], number);
    --server.now[bytes];
    --server.under_way;
}

struct RemoteStore : Store {
    using Store::Store;
    RemoteStore(Random &random, bool sharded, int64_t longest = 40) : Store(random, sharded, longest) { number = 7; }
};

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
    check_all_answered();
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

// A store of so many chunks of 2³ along each axis, of which an eighth is missing, and a job of all of it.
struct ManyChunks : RemoteStore {
    ManyChunks(Random &random, int64_t count) : RemoteStore(random, false) {
        for (int a = 0; a < RANK; ++a) {
            shape[a] = 2 * count;
            chunk[a] = geometry.chunk_shape[a] = 2;
        }
        voxels.assign(static_cast<size_t>(8 * count * count * count), FILL);
        std::filesystem::remove_all(folder.path);
        std::filesystem::create_directory(folder.path);
        write_file(metadata, "{}");
        write(random);
    }
    // Read all, and return the seconds.
    double read(Random &random, lc_reader *reader, int64_t expected = LC_OK) {
        Jobs jobs(*this, random, 1);
        for (int a = 0; a < RANK; ++a) {
            jobs.start[static_cast<size_t>(a)] = 0;
            jobs.stop[static_cast<size_t>(a)] = shape[a];
        }
        jobs.strides = {2 * shape[1] * shape[2], 2 * shape[2], 2};
        jobs.outputs[0].assign(voxels.size(), 0);
        jobs.address[0] = reinterpret_cast<int64_t>(jobs.outputs[0].data());
        const double begin = seconds();
        CHECK(jobs.submit(reader) == 0);
        CHECK(jobs.settle()[0] == expected);
        return seconds() - begin;
    }
    static double seconds() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
};

// Many requests are under way, on however few cores.
TEST(requests_have_threads_of_their_own) {
    constexpr int64_t REQUESTS = 32;
    lc_set_fetch(carry_out);
    Random random(3);
    ManyChunks store(random, 5);
    server.gather = REQUESTS;
    lc_reader *reader = new_reader();
    store.read(random, reader);
    CHECK(server.most >= REQUESTS);
    close_reader(reader);
}

int64_t hedges_of(lc_reader *reader) {
    lc_stats stats;
    lc_reader_stats(reader, &stats);
    return stats.hedges;
}

// A busy machine may hold all responses up, so that none is late beside the others: these tests then read again.

// One answer of a thousand takes 2 s: the request is sent again, and the late answer, of wrong bytes if another one came
// before it, is not used.
TEST(a_late_answer_holds_nobody_up) {
    lc_set_fetch(carry_out);
    Random random(3);
    ManyChunks store(random, 13);
    lc_reader *reader = new_reader();
    server.usual_ms = 5;
    const double without = store.read(random, reader);
    CHECK(hedges_of(reader) <= 1 + server.requests / 50);
    const int64_t before = hedges_of(reader), requests = server.requests;
    server.late_each = 1000;
    server.late_ms = 2000;
    server.late_is_wrong = true;
    double with_late = 1e9;
    int64_t hedges = 0;
    for (int n = 0; n < 5 && (hedges < 2 || with_late > without + 0.5); ++n) {
        with_late = store.read(random, reader);
        hedges = hedges_of(reader) - before;
    }
    std::printf("%.3f s, with late answers %.3f s, %d hedges of %d\n", without, with_late, static_cast<int>(hedges),
                static_cast<int>(server.requests - requests));
    CHECK(with_late < without + 0.5);
    CHECK(hedges >= 2);
    CHECK(hedges <= 9 + (server.requests - requests) / 50);
    CHECK(server.under_way >= 1);  // nobody waits for it
    close_reader(reader);
    lc_shutdown();
    CHECK(server.under_way == 0);
    CHECK(all_is_given_back());
}

// Where the second request fails, the late answer to the first one counts.
TEST(a_second_request_that_fails) {
    lc_set_fetch(carry_out);
    Random random(5);
    ManyChunks store(random, 8);
    lc_reader *reader = new_reader();
    server.usual_ms = 6;
    server.late_each = 100;
    server.late_ms = 300;
    server.second_fails = true;
    for (int n = 0; n < 20 && hedges_of(reader) == 0; ++n) store.read(random, reader);
    CHECK(hedges_of(reader) >= 1);
    close_reader(reader);
    check_all_answered();
}

// Without answers to compare with, or where late answers are usual, none or few requests are sent again.
TEST(few_requests_are_sent_again) {
    lc_set_fetch(carry_out);
    Random random(4);
    ManyChunks few(random, 2), many(random, 8);
    lc_reader *reader = new_reader();
    server.late_each = 5;
    server.late_ms = 150;
    server.usual_ms = 6;
    few.read(random, reader);
    CHECK(hedges_of(reader) == 0);
    lc_set_hedging(0);
    many.read(random, reader);
    CHECK(hedges_of(reader) == 0);
    lc_set_hedging(1);
    for (int n = 0; n < 20 && hedges_of(reader) == 0; ++n) many.read(random, reader);
    CHECK(hedges_of(reader) >= 1);
    CHECK(hedges_of(reader) <= 1 + server.requests / 50);
    close_reader(reader);
}

// A response that breaks off, or brings too little, is requested again, a bounded number of times; others are not.
TEST(broken_responses_are_repeated) {
    lc_set_fetch(carry_out);
    Random random(6);
    ManyChunks store(random, 1);
    while (!std::filesystem::exists(store.prefix + "0.0.0")) store.write(random);
    lc_reader *reader = new_reader();
    const auto requests_of = [&](int64_t code) {
        server.requests = 0;
        store.read(random, reader, code);
        return server.requests.load();
    };
    for (int64_t count = 0; count <= 3; ++count) {
        server.broken = count;
        CHECK(requests_of(LC_OK) == 1 + count);
    }
    server.broken = 1000;
    CHECK(requests_of(LC_REMOTE) == 4);
    server.broken = 0;
    server.fail_at = 1;
    CHECK(requests_of(LC_REMOTE) == 1);
    server.fail_at = 0;
    server.cut_at = 1;
    CHECK(requests_of(LC_OK) == 2);
    server.cut_at = -1;
    CHECK(requests_of(LC_SHORT) == 4);
    server.cut_at = 0;
    close_reader(reader);
    CHECK(all_is_given_back());
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
                    // Raw chunks are read by one request, which no other one contradicts.
                    if (kind == 0) CHECK(code == LC_OK || code == LC_REMOTE);
                    if (kind == 1) CHECK(code == LC_OK);
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
        check_all_answered();
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

}  // namespace
