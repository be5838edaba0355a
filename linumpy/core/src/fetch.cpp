// Requests to object stores, for all readers of the process: a bounded number is in flight. A request whose response
// takes far longer than others is sent once more, and the first answer counts. A response that breaks off is requested
// again.
#include <algorithm>
#include <array>
#include <mutex>

#include "execution.hpp"

namespace lc {
namespace {

std::atomic<lc_fetch_object> fetch_object{nullptr};
std::atomic<bool> hedging{true};
// Requests in flight: at least this many, and more where a response takes long.
constexpr i64 MIN_REQUESTS = 32;
// Python carries out about half as many: more requests in flight would only wait for its lock.
constexpr double REQUESTS_PER_SECOND = 20'000;
constexpr double BYTES_PER_SECOND = 5e7;  // of a slow connection: the time of these bytes is not counted as latency
// A response is late after this many times the latency that 95 % of the last responses did not exceed, and at least
// after LATE_SECONDS. This is worked out after each MIN_PEERS responses.
constexpr double LATE_FACTOR = 3, LATE_SECONDS = 0.02;
constexpr size_t PEERS = 128, MIN_PEERS = 16;
// Where the shortest latencies are less, requests are sent by the threads that wait for them, which costs less, and once.
constexpr double DIRECT_SECONDS = 4e-3;
// Second requests: this part of all requests, and one more; saved up for later to a maximum; and at most so many in
// flight.
constexpr double HEDGED_PART = 0.02, MAX_SAVED = 8;
constexpr i64 MAX_HEDGES = 32;
// A response that breaks off is requested again, after pauses of this many seconds, 2 times and 4 times as many.
constexpr int MAX_REPEATS = 3;
constexpr double PAUSE_SECONDS = 0.1;

// State that all requests of the process share.
struct Requests {
    explicit Requests(i64 waits) : limit(std::min(MIN_REQUESTS, waits)), threads(waits + MAX_HEDGES, 0) {}
    Limit limit;
    Pool threads;  // that carry out requests: a thread that waits for a response can go on without it
    std::mutex mutex;
    i64 lent = 0;  // number of open loans
    i64 count = 0;  // number of loans in `returned`
    std::array<i64, 16> returned;  // loans that have ended, and that no call has reported yet
    std::array<double, PEERS> latencies;  // seconds of the last responses, without those of their bytes
    size_t responses = 0;
    double fast = 0, slow = 0;  // what 10 % and 95 % of the last latencies did not exceed; 0 before MIN_PEERS responses
    double hedges_saved = 1;
    i64 hedges = 0;  // requests sent twice of which not both responses have come
};

std::atomic<Requests *> shared_requests{nullptr};

Requests &requests() {
    return created_once(shared_requests, [] { return new Requests(Pool::shared().waits()); });
}

// Call the caller's function with a request, and report returned loans. With `loan`, there is no request: the next call
// reports the loan, unless the loan is the last open one or the buffer of returned loans is full.
void call(lc_fetch &record, i64 loan = 0) {
    std::array<i64, 16> returned;
    {
        Requests &shared = requests();
        const std::lock_guard lock(shared.mutex);
        if (loan) {
            shared.returned[static_cast<size_t>(shared.count++)] = loan;
            if (--shared.lent && shared.count < static_cast<i64>(returned.size())) return;
        }
        returned = shared.returned;
        record.returned_count = std::exchange(shared.count, 0);
    }
    record.returned = returned.data();
    fetch_object.load()(&record);
    if (!record.loan) return;
    const std::lock_guard lock(requests().mutex);
    ++requests().lent;
}

// Note the latency of a response. Have as many requests in flight as Python carries out in the latency of the fastest
// responses (Little's law): those of the others contain the time in which requests wait for each other.
void note_latency(double seconds) {
    Requests &shared = requests();
    i64 count = 0;
    {
        const std::lock_guard lock(shared.mutex);
        shared.latencies[shared.responses++ % PEERS] = std::max(0.0, seconds);
        if (shared.responses % MIN_PEERS) return;
        std::array<double, PEERS> sorted = shared.latencies;
        const size_t peers = std::min(PEERS, shared.responses);
        std::sort(sorted.begin(), sorted.begin() + static_cast<i64>(peers));
        shared.fast = sorted[peers / 10];
        shared.slow = sorted[peers * 95 / 100];
        count = static_cast<i64>(shared.fast * REQUESTS_PER_SECOND);
    }
    const i64 most = Pool::shared().waits();
    shared.limit.change(std::clamp(count, std::min(MIN_REQUESTS, most), most));
}

// Seconds after which the response to a request of so many bytes is late.
double late_after(i64 nbytes) {
    Requests &shared = requests();
    const std::lock_guard lock(shared.mutex);
    return std::max(LATE_SECONDS, LATE_FACTOR * shared.slow) + static_cast<double>(nbytes) / BYTES_PER_SECOND;
}

bool are_direct() {
    const std::lock_guard lock(requests().mutex);
    return requests().fast < DIRECT_SECONDS;
}

// Whether one more second request may be sent, which is then counted.
bool may_hedge() {
    Requests &shared = requests();
    const std::lock_guard lock(shared.mutex);
    if (shared.hedges_saved < 1 || shared.hedges >= MAX_HEDGES) return false;
    --shared.hedges_saved;
    ++shared.hedges;
    return true;
}

// One request, which is sent once or twice; the first answer counts. An error counts only if no other answer is awaited.
class Race {
public:
    Race(i64 store, const std::string &key, i64 offset, i64 nbytes, i64 capacity) : key_(key) {
        request_.store = store;
        request_.key = key_.c_str();
        request_.offset = offset;
        request_.nbytes = nbytes;
        request_.capacity = capacity;
        request_.code = LC_REMOTE;
    }
    // Send the request: on another thread, by a work that calls `carry_out`, or without a work on this thread.
    void send(std::shared_ptr<Work> sending);
    void carry_out();
    // Wait for the answer; false if there is none after these seconds.
    bool wait(double seconds) {
        std::unique_lock lock(mutex_);
        return answered_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return is_answered_; });
    }
    const lc_fetch &answer() const { return answer_; }
    i64 max_nbytes() const { return request_.capacity; }

private:
    const std::string key_;
    lc_fetch request_{}, answer_{};
    std::mutex mutex_;
    std::condition_variable answered_;
    int sent_ = 0, awaited_ = 0;
    bool is_answered_ = false;
};

class Sending : public OneStep {
public:
    explicit Sending(std::shared_ptr<Race> race) : race_(std::move(race)) {}
    void run(i64) noexcept override { race_->carry_out(); }

private:
    const std::shared_ptr<Race> race_;
};

void Race::send(std::shared_ptr<Work> sending) {
    {
        const std::lock_guard lock(mutex_);
        ++sent_;
        ++awaited_;
    }
    // In the second case no thread could be started.
    if (!sending || requests().threads.add(std::move(sending), false)) carry_out();
}

void Race::carry_out() {
    lc_fetch record = request_;
    const double begin = now();
    call(record);
    if (record.code == LC_OK) note_latency(now() - begin - static_cast<double>(record.got) / BYTES_PER_SECOND);
    bool counts, is_last_of_two;
    {
        const std::lock_guard lock(mutex_);
        is_last_of_two = !--awaited_ && sent_ > 1;
        counts = !is_answered_ && (!awaited_ || record.code == LC_OK || record.code == LC_MISSING);
        if (counts) answer_ = record;
        is_answered_ |= counts;
    }
    if (is_last_of_two) {
        const std::lock_guard lock(requests().mutex);
        --requests().hedges;
    }
    if (counts) answered_.notify_one();
    else const Fetched unused(record);  // its bytes are given back
}

// Whether a response has fewer bytes than it must have.
bool is_short(const lc_fetch &answer) {
    i64 expected = answer.nbytes < 0 ? answer.size : answer.nbytes;
    if (answer.size >= 0) expected = std::min(expected, answer.size - std::max<i64>(0, answer.offset));
    return answer.code == LC_OK && answer.got < expected && expected <= answer.capacity;
}

// The answer to a request, which is sent a second time if the response is late.
lc_fetch answer_to(const std::shared_ptr<Race> &race, i64 &hedges, const std::function<bool()> &is_cancelled) {
    race->send(are_direct() ? nullptr : std::make_shared<Sending>(race));
    bool is_hedged = false;
    for (double factor = 1; !race->wait(factor * late_after(race->max_nbytes())); factor *= 2) {
        if (is_hedged || !hedging || is_cancelled()) continue;
        auto second = std::make_shared<Sending>(race);
        if (!may_hedge()) continue;
        is_hedged = true;
        ++hedges;
        race->send(std::move(second));
    }
    return race->answer();
}

// Counts a request as one that is in flight.
class InFlight {
public:
    explicit InFlight(Limit &limit) : limit_(limit) {
        limit_.acquire(1);
        Requests &shared = requests();
        const std::lock_guard lock(shared.mutex);
        shared.hedges_saved = std::min(shared.hedges_saved + HEDGED_PART, MAX_SAVED);
    }
    ~InFlight() { limit_.release(1); }
    InFlight(const InFlight &) = delete;
    InFlight &operator=(const InFlight &) = delete;

private:
    Limit &limit_;
};

}  // namespace

void set_fetch(lc_fetch_object function) { fetch_object.store(function); }

void set_hedging(bool allowed) { hedging.store(allowed); }

void forget_requests() { shared_requests.store(nullptr); }

void stop_requests() noexcept {
    if (Requests *shared = shared_requests.load()) shared->threads.stop();
}

Fetched::~Fetched() {
    lc_fetch record{};
    if (loan_) call(record, loan_);
}

bool fetch(i64 store, const std::string &key, i64 offset, i64 nbytes, i64 capacity, Fetched &fetched, Failure &failure,
           const std::function<bool()> &is_cancelled) {
    lc_fetch answer{};
    answer.code = fetch_object.load() ? LC_CANCELLED : LC_REMOTE;
    fetched = {};
    i64 hedges = 0;
    if (fetch_object.load()) {
        const InFlight counted(requests().limit);
        const StorageWait wait(true);  // another thread works meanwhile
        for (int repeats = 0; !is_cancelled(); ++repeats) {
            answer = answer_to(std::make_shared<Race>(store, key, offset, nbytes, capacity), hedges, is_cancelled);
            fetched = Fetched(answer);
            if ((answer.code != LC_BROKEN && !is_short(answer)) || repeats == MAX_REPEATS) break;
            std::this_thread::sleep_for(std::chrono::duration<double>(PAUSE_SECONDS * (1 << repeats)));
        }
    }
    fetched.hedges = hedges;
    if (answer.code == LC_OK) return true;
    failure.code = answer.code == LC_BROKEN ? i64{LC_REMOTE} : answer.code;
    failure.text = answer.text;
    return false;
}

Version version_in_store(i64 store, const std::string &key, const std::atomic<bool> &closing) {
    Fetched fetched;
    Failure failure;
    const bool exists = fetch(store, key, 0, 0, 0, fetched, failure, [&] { return closing.load(); });
    return exists && is_known(fetched.version) ? fetched.version : Version{};
}

}  // namespace lc
