#define _GNU_SOURCE
#include "census.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A process's CPU clock counts all its threads in nanoseconds, ended ones included, which summing /proc does not. */
static double cpu_seconds(pid_t pid) {
    clockid_t clock;
    struct timespec used;
    if (clock_getcpuclockid(pid, &clock) || clock_gettime(clock, &used)) return 0;
    return (double)used.tv_sec + (double)used.tv_nsec / 1e9;
}

static void add_tree(struct census *census, pid_t pid) {
    char name[300];
    if (census->count == MOST_PROCESSES) return;
    struct member *member = &census->members[census->count++];
    *member = (struct member){.pid = pid, .before = cpu_seconds(pid)};
    snprintf(name, sizeof name, "/proc/%d/task", pid);
    DIR *tasks = opendir(name);
    if (!tasks) return;
    for (struct dirent *task; (task = readdir(tasks));) {
        if (task->d_name[0] == '.') continue;
        snprintf(name, sizeof name, "/proc/%d/task/%.20s/children", pid, task->d_name);
        FILE *file = fopen(name, "r");
        if (!file) continue;
        for (int child; fscanf(file, "%d", &child) == 1;) add_tree(census, child);
        fclose(file);
    }
    closedir(tasks);
}

void take_census(struct census *census, const char *roots) {
    for (char *rest = (char *)roots; *rest; rest += *rest == ',') {
        pid_t pid = (pid_t)strtol(rest, &rest, 10);
        if (pid <= 0) return;
        add_tree(census, pid);
    }
}

void close_census(struct census *census) {
    for (int i = 0; i < census->count; i++) {
        struct member *member = &census->members[i];
        double now = cpu_seconds(member->pid);
        member->cpu_s = now > member->before ? now - member->before : 0;
        char line[256];
        snprintf(line, sizeof line, "/proc/%d/status", member->pid);
        FILE *file = fopen(line, "r");
        if (!file) continue;
        while (fgets(line, sizeof line, file)) {
            sscanf(line, "Name: %31[^\n\"\\]", member->name);
            sscanf(line, "VmRSS: %ld", &member->rss_kb);
        }
        fclose(file);
    }
}

void print_census(const struct census *census) {
    double cpu_s = 0;
    long rss_kb = 0;
    for (int i = 0; i < census->count; i++) cpu_s += census->members[i].cpu_s, rss_kb += census->members[i].rss_kb;
    printf("\"cpu_s\":%.6f,\"rss_kb\":%ld,\"processes\":[", cpu_s, rss_kb);
    for (int i = 0; i < census->count; i++) {
        const struct member *member = &census->members[i];
        printf("%s{\"pid\":%d,\"name\":\"%s\",\"cpu_s\":%.6f,\"rss_kb\":%ld}", i ? "," : "", member->pid, member->name, member->cpu_s, member->rss_kb);
    }
    printf("]");
}
