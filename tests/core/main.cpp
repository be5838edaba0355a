// Runs the tests that the command line names, or all; each in a process of its own, so that threads of one are not there
// in the next, and one that crashes or hangs is named.
#include <signal.h>
#include <sys/wait.h>

#include <cstring>

#include "check.hpp"

int main(int count, char **names) {
    constexpr unsigned MOST_SECONDS = 120;
    int bad = 0, ran = 0;
    for (const Test *test = Test::first(); test; test = test->next) {
        bool wanted = count < 2;
        for (int n = 1; n < count; ++n) wanted |= !std::strcmp(names[n], test->name);
        if (!wanted) continue;
        ++ran;
        std::fflush(nullptr);
        const pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            alarm(MOST_SECONDS);
            test->run();
            lc_shutdown();
            std::exit(0);
        }
        int state = 0;
        CHECK(waitpid(child, &state, 0) == child);
        if (!state) std::printf("ok %s\n", test->name);
        else if (WIFSIGNALED(state)) std::printf("FAILED %s: %s\n", test->name, strsignal(WTERMSIG(state)));
        else std::printf("FAILED %s: exit %d\n", test->name, WEXITSTATUS(state));
        bad += state != 0;
    }
    return bad || !ran ? 1 : 0;
}
