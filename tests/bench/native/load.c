/* A closed loop of chat requests over kept-alive connections, and one line of JSON about what came back.
 *
 *     load port=8080 [connections=32] [body=1024] [stream=CHUNKS step_us=20000] [seconds=2] [warm=0.5] [ramp=0]
 *          [prompts=16] [model=bench] [path=/v1/chat/completions] [processes=PID,PID...]
 *
 * Every connection sends its next request when its answer is whole. A request of `body` bytes repeats one of `prompts`
 * long conversations and ends in a number of its own: a new turn of a known prefix. The first requests are spread over
 * `ramp` seconds; what happens in the first `warm` seconds is not counted, errors and short answers excepted.
 *
 * latency: request begun to answer whole. first: request begun to first content chunk. delay: from the stamp that the
 * stand-in worker put into a chunk (see wire.h) to the read that brought it here, one way, same clock. A short answer is
 * one that ended too early or, streamed, without all its chunks and [DONE]. Processes are counted with all descendants. */
#define _GNU_SOURCE
#include "census.h"
#include "samples.h"
#include "wire.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONCE = 16, MESSAGE = 4000, BATCH = 512, BUFFER = 1 << 17, GIVE_UP = 100 };
enum stage { IDLE, HEAD, BODY };
enum framing { SIZE, DATA, DATA_END, TRAILER };

struct prompt { char *before, *after; size_t before_length, after_length; };
struct lane { /* one connection */
    int fd;
    enum stage stage;
    uint64_t begun;
    const struct prompt *prompt;
    char nonce[NONCE + 1], request[512];
    size_t request_length, sent, total;
    char text[4096]; /* the answer's head; after it, the line that is being read */
    size_t text_length;
    bool chunked, closes, good, done;
    enum framing framing;
    long long left;
    int chunks;
};

static int port = 0, connections = 32, stream = 0, prompt_count = 16, poller;
static long step_us = 0, body_length = 1024;
static double seconds = 2, warm = 0.5, ramp = 0;
static const char *path = "/v1/chat/completions", *model = "bench", *processes = "";
static struct prompt *prompts;
static struct samples latency, first, delay;
static uint64_t turn, requests, errors, shorts, chunks, bytes, reconnects;
static bool counting;
static char buffer[BUFFER];

/* ---- requests ---- */

/* A conversation of messages of about 4 KB, from words that differ from prompt to prompt. */
static void write_prompt(struct prompt *p, uint64_t seed) {
    static const char *const words[] = {"river", "stone", "carries", "every", "letter", "home", "before", "winter", "light", "over", "roof", "and", "field"};
    char *to = p->before = malloc((size_t)body_length + 2048);
    to += sprintf(to, "{\"model\":\"%s\",\"max_tokens\":%d,\"seed\":%ld,\"temperature\":0,%s\"messages\":[{\"role\":\"system\",\"content\":\"", model,
                  stream ? stream : 16, step_us, stream ? "\"stream\":true,\"stream_options\":{\"include_usage\":true}," : "");
    bool user = false;
    for (char *message = to; to - p->before < body_length - 64;) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        to += sprintf(to, "%s ", words[(seed >> 33) % (sizeof words / sizeof *words)]);
        if (to - message < MESSAGE) continue;
        user = !user;
        message = to += sprintf(to, "\"},{\"role\":\"%s\",\"content\":\"", user ? "user" : "assistant");
    }
    to += sprintf(to, "\"},{\"role\":\"user\",\"content\":\"turn ");
    p->before_length = (size_t)(to - p->before);
    p->after = "\"}]}";
    p->after_length = strlen(p->after);
}

static void watch(struct lane *lane, int operation, bool writable) {
    struct epoll_event event = {.events = EPOLLIN | (writable ? EPOLLOUT : 0u), .data.ptr = lane};
    epoll_ctl(poller, operation, lane->fd, &event);
}

static bool dial(struct lane *lane) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;
    lane->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(lane->fd, (struct sockaddr *)&address, sizeof address)) return close(lane->fd), lane->fd = -1, false;
    setsockopt(lane->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    watch(lane, EPOLL_CTL_ADD, false);
    return true;
}

static void push(struct lane *lane) {
    struct iovec parts[4] = {{lane->request, lane->request_length}, {lane->prompt->before, lane->prompt->before_length},
                             {lane->nonce, NONCE}, {lane->prompt->after, lane->prompt->after_length}};
    size_t skip = lane->sent;
    int from = 0;
    while (from < 4 && skip >= parts[from].iov_len) skip -= parts[from++].iov_len;
    if (from < 4) parts[from].iov_base = (char *)parts[from].iov_base + skip, parts[from].iov_len -= skip;
    struct msghdr message = {.msg_iov = parts + from, .msg_iovlen = (size_t)(4 - from)};
    ssize_t took = sendmsg(lane->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (took > 0) lane->sent += (size_t)took;
    watch(lane, EPOLL_CTL_MOD, lane->sent < lane->total); /* a dead socket shows when it is read */
}

static void begin(struct lane *lane) {
    lane->stage = IDLE;
    if (lane->fd < 0) {
        if (!dial(lane)) { errors++; return; }
        reconnects++;
    }
    lane->prompt = &prompts[turn % (uint64_t)prompt_count];
    snprintf(lane->nonce, sizeof lane->nonce, "%016llx", (unsigned long long)(turn++ + ((uint64_t)getpid() << 40)));
    size_t length = lane->prompt->before_length + NONCE + lane->prompt->after_length;
    lane->request_length = (size_t)snprintf(lane->request, sizeof lane->request, "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: load\r\naccept: */*\r\n"
                                            "content-type: application/json\r\ncontent-length: %zu\r\n\r\n", path, port, length);
    lane->total = lane->request_length + length;
    lane->sent = lane->text_length = 0;
    lane->chunks = 0, lane->done = false;
    lane->stage = HEAD;
    lane->begun = tick();
    push(lane);
}

/* ---- answers ---- */

static void hang_up(struct lane *lane) { close(lane->fd), lane->fd = -1; }

static void finish(struct lane *lane, uint64_t now) {
    if (!lane->good) errors++;
    else if (stream && (lane->chunks != stream || !lane->done)) shorts++;
    else if (counting) requests++, note(&latency, lane->begun, now);
    if (lane->closes) hang_up(lane);
    begin(lane);
}

/* Reads one line of an event stream; a chunk that carries no stamp is no content. */
static void read_line(struct lane *lane, uint64_t now) {
    lane->text[lane->text_length] = 0;
    if (!strncmp(lane->text, "data:", 5)) {
        const char *stamp = strchr(lane->text, '@');
        if (stamp) {
            if (counting) chunks++, note(&delay, strtoull(stamp + 1, NULL, 10), now);
            if (!lane->chunks++ && counting) note(&first, lane->begun, now);
        } else if (strstr(lane->text, "[DONE]")) lane->done = true;
    }
    lane->text_length = 0;
}

static void read_body(struct lane *lane, const char *from, size_t length, uint64_t now) {
    while (stream && length) {
        const char *newline = memchr(from, '\n', length);
        size_t part = newline ? (size_t)(newline - from) : length, room = sizeof lane->text - 1 - lane->text_length;
        memcpy(lane->text + lane->text_length, from, part < room ? part : room);
        lane->text_length += part < room ? part : room;
        if (!newline) return;
        read_line(lane, now);
        from += part + 1, length -= part + 1;
    }
}

/* Takes bytes of a head; returns how many were used. */
static size_t read_head(struct lane *lane, const char *from, size_t length) {
    size_t before = lane->text_length, room = sizeof lane->text - 1 - before, part = length < room ? length : room;
    memcpy(lane->text + before, from, part);
    lane->text_length += part;
    char *blank = memmem(lane->text, lane->text_length, "\r\n\r\n", 4);
    if (!blank) return part;
    blank[2] = 0;
    const char *coding = header(lane->text, "transfer-encoding:"), *size = header(lane->text, "content-length:"), *fate = header(lane->text, "connection:");
    lane->good = !strncmp(lane->text + 8, " 200", 4);
    if (!lane->good && !errors) fprintf(stderr, "load: %.200s\n", lane->text);
    lane->chunked = coding != NULL;
    lane->closes = fate && !strncasecmp(fate, "close", 5);
    lane->left = size && !coding ? atoll(size) : 0;
    lane->framing = SIZE;
    lane->stage = BODY;
    lane->text_length = 0;
    return (size_t)(blank + 4 - lane->text) - before;
}

/* Takes bytes of a chunked body; returns how many were used. The stage is IDLE when it was the last of them. */
static size_t read_chunked(struct lane *lane, const char *from, size_t length, uint64_t now) {
    if (lane->framing == DATA) {
        size_t part = (size_t)lane->left < length ? (size_t)lane->left : length;
        read_body(lane, from, part, now);
        if (!(lane->left -= (long long)part)) lane->framing = DATA_END;
        return part;
    }
    char byte = *from;
    if (lane->framing == SIZE) {
        if (byte >= '0' && byte <= '9') lane->left = lane->left * 16 + byte - '0';
        else if ((byte | 32) >= 'a' && (byte | 32) <= 'f') lane->left = lane->left * 16 + (byte | 32) - 'a' + 10;
        else if (byte == '\n') lane->framing = lane->left ? DATA : TRAILER;
    } else if (byte == '\n') {
        if (lane->framing == TRAILER) lane->stage = IDLE;
        lane->framing = SIZE, lane->left = 0;
    }
    return 1;
}

static void feed(struct lane *lane, const char *from, size_t length, uint64_t now) {
    while (length && lane->stage != IDLE) {
        size_t used;
        if (lane->stage == HEAD) used = read_head(lane, from, length);
        else if (lane->chunked) used = read_chunked(lane, from, length, now);
        else {
            used = (size_t)lane->left < length ? (size_t)lane->left : length;
            read_body(lane, from, used, now);
            lane->left -= (long long)used;
        }
        from += used, length -= used;
        if (lane->stage == BODY && !lane->chunked && !lane->left) lane->stage = IDLE;
        if (!used) break; /* a head that never ends */
    }
    if (lane->stage == IDLE) finish(lane, now);
}

static void receive(struct lane *lane) {
    ssize_t got = recv(lane->fd, buffer, BUFFER, MSG_DONTWAIT);
    uint64_t now = tick();
    if (got > 0) {
        if (counting) bytes += (uint64_t)got;
        feed(lane, buffer, (size_t)got, now);
    } else if (got == 0 || errno != EAGAIN) {
        if (lane->stage == BODY) shorts++;
        else errors++;
        hang_up(lane);
        begin(lane);
    }
}

/* ---- the run ---- */

static bool read_option(const char *word) {
    const struct { const char *name; enum { INT, LONG, DOUBLE, TEXT } type; void *to; } options[] = {
        {"port=", INT, &port}, {"connections=", INT, &connections}, {"body=", LONG, &body_length}, {"stream=", INT, &stream},
        {"step_us=", LONG, &step_us}, {"seconds=", DOUBLE, &seconds}, {"warm=", DOUBLE, &warm}, {"ramp=", DOUBLE, &ramp},
        {"prompts=", INT, &prompt_count}, {"path=", TEXT, &path}, {"model=", TEXT, &model}, {"processes=", TEXT, &processes}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        size_t length = strlen(options[i].name);
        if (strncmp(word, options[i].name, length)) continue;
        if (options[i].type == INT) *(int *)options[i].to = atoi(word + length);
        else if (options[i].type == LONG) *(long *)options[i].to = atol(word + length);
        else if (options[i].type == DOUBLE) *(double *)options[i].to = atof(word + length);
        else *(const char **)options[i].to = word + length;
        return true;
    }
    return false;
}

/* Runs until the window closes. Returns its seconds. */
static double run(struct lane *lanes, struct census *census) {
    uint64_t start = tick(), opens = start + (uint64_t)(warm * 1e9), closes = opens + (uint64_t)(seconds * 1e9), opened = 0;
    struct epoll_event events[BATCH];
    for (int begun = 0;;) {
        uint64_t now = tick();
        for (; begun < connections && now >= start + (uint64_t)(ramp * 1e9 * begun / connections); begun++) begin(&lanes[begun]);
        if (!counting && now >= opens) counting = true, take_census(census, processes), opened = now = tick();
        if (now >= closes || errors > GIVE_UP) return opened ? (double)(now - opened) / 1e9 : 0;
        int count = epoll_wait(poller, events, BATCH, begun < connections ? 1 : 10);
        for (int i = 0; i < count; i++) {
            struct lane *lane = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) push(lane);
            if (events[i].events & ~(uint32_t)EPOLLOUT) receive(lane);
        }
    }
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (!read_option(argv[i])) return fprintf(stderr, "load: unknown option %s\n", argv[i]), 2;
    poller = epoll_create1(0);
    prompts = calloc((size_t)prompt_count, sizeof *prompts);
    for (int i = 0; i < prompt_count; i++) write_prompt(&prompts[i], (uint64_t)i + 1);
    struct lane *lanes = calloc((size_t)connections, sizeof *lanes);
    for (int i = 0; i < connections; i++)
        if (!dial(&lanes[i])) return fprintf(stderr, "load: cannot connect to port %d: %s\n", port, strerror(errno)), 1;
    static struct census census;
    double took = run(lanes, &census);
    close_census(&census);
    if (took <= 0) return fprintf(stderr, "load: gave up after %llu errors\n", (unsigned long long)errors), 1;
    printf("{\"seconds\":%.4f,\"requests\":%llu,\"rps\":%.2f,\"errors\":%llu,\"short\":%llu,\"reconnects\":%llu,\"bytes\":%llu,\"chunks\":%llu,\"chunks_per_s\":%.1f,",
           took, (unsigned long long)requests, (double)requests / took, (unsigned long long)errors, (unsigned long long)shorts,
           (unsigned long long)reconnects, (unsigned long long)bytes, (unsigned long long)chunks, (double)chunks / took);
    print_samples("latency_ms", &latency), print_samples("first_ms", &first), print_samples("delay_ms", &delay);
    print_census(&census);
    printf("}\n");
    return 0;
}
