/* CPU seconds and memory of processes and all that descends from them, over a span of time. */
#pragma once
#include <sys/types.h>

enum { MOST_PROCESSES = 256 };

struct census {
    int count;
    struct member { pid_t pid; double before, cpu_s; long rss_kb; char name[32]; } members[MOST_PROCESSES];
};

/* Finds "PID,PID,..." with their descendants and notes their CPU time. */
void take_census(struct census *census, const char *roots);
/* Notes CPU time since then, and memory. A process that has ended meanwhile keeps what it had: nothing. */
void close_census(struct census *census);
/* Prints `"cpu_s":…,"rss_kb":…,"processes":[…]`. */
void print_census(const struct census *census);
