/* What a worker says: its frames, its one-piece answers, its pages about itself. */
#define _GNU_SOURCE
#include "upstream.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CREATED "\"created\":1764547200"
#define ID "\"id\":\"cmpl-5f0c1f7d2b6e4c8f9a3d7e1b0c2d4f68\""
#define LOOK 4096 /* bytes at either end of a body in which the steering fields are looked for */

struct persona persona = {"bench", 262144, 0};
struct frame role_frame, token_frame[2], last_frame[2];

static const char *object_of(bool chat) { return chat ? "chat.completion.chunk" : "text_completion"; }

static void make_frame(struct frame *frame, bool chat, const char *choice) {
    char event[600];
    int length = snprintf(event, sizeof event, "data: {" ID ",\"object\":\"%s\"," CREATED ",\"model\":\"%s\",\"choices\":[{\"index\":0,%s}]}\n\n",
                          object_of(chat), persona.model, choice);
    frame->length = (size_t)snprintf(frame->bytes, sizeof frame->bytes, "%x\r\n%s\r\n", length, event);
    const char *mark = strchr(frame->bytes, '@');
    frame->stamp = mark ? (size_t)(mark + 1 - frame->bytes) : 0;
}

void make_frames(void) {
    make_frame(&role_frame, true, "\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null");
    make_frame(&token_frame[1], true, "\"delta\":{\"content\":\" @000000000000000000 sun\"},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null");
    make_frame(&token_frame[0], false, "\"text\":\" @000000000000000000 sun\",\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null");
    make_frame(&last_frame[1], true, "\"delta\":{\"content\":\"\"},\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null");
    make_frame(&last_frame[0], false, "\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null");
}

static void write_usage(char *to, size_t room, size_t prompt, int completion) {
    /* All whole blocks of 16 but the newest turn, as an engine that has seen the rest of the prompt would say. */
    size_t cached = prompt > 32 ? (prompt - 32) / 16 * 16 : 0;
    snprintf(to, room, "\"usage\":{\"prompt_tokens\":%zu,\"total_tokens\":%zu,\"completion_tokens\":%d,\"prompt_tokens_details\":{\"cached_tokens\":%zu}}",
             prompt, prompt + (size_t)completion, completion, cached);
}

size_t frame_usage(char *to, size_t room, const struct connection *c) {
    char event[512], usage[256];
    write_usage(usage, sizeof usage, c->prompt, c->sent);
    int length = snprintf(event, sizeof event, "data: {" ID ",\"object\":\"%s\"," CREATED ",\"model\":\"%s\",\"choices\":[],%s}\n\n", object_of(c->chat), persona.model, usage);
    return (size_t)snprintf(to, room, "%x\r\n%s\r\n", length, event);
}

static bool answer(struct connection *c, int status, const char *type, const char *body, size_t length) {
    char head[256];
    size_t n = (size_t)snprintf(head, sizeof head, "HTTP/1.1 %d %s\r\ndate: Mon, 01 Dec 2025 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: %s\r\ncontent-length: %zu\r\n%s\r\n",
                                status, status == 200 ? "OK" : "Error", type, length, c->closes ? "connection: close\r\n" : "");
    char *whole = malloc(n + length);
    memcpy(whole, head, n);
    memcpy(whole + n, body, length);
    bool sent = emit(c, whole, n + length);
    free(whole);
    return sent;
}

static bool answer_json(struct connection *c, const char *body) { return answer(c, 200, "application/json", body, strlen(body)); }

bool refuse(struct connection *c, int status, const char *why) {
    char body[256];
    int n = snprintf(body, sizeof body, "{\"error\":{\"message\":\"%s\",\"type\":\"invalid_request_error\",\"param\":null,\"code\":%d}}", why, status);
    return answer(c, status, "application/json", body, (size_t)n);
}

/* Reads `"name": 123` (true is 1, null and false are `otherwise`) near either end of a body. */
static long field(const char *body, size_t length, const char *name, long otherwise) {
    size_t span = length < LOOK ? length : LOOK;
    const char *at = memmem(body, span, name, strlen(name));
    if (!at) at = memmem(body + length - span, span, name, strlen(name));
    if (!at) return otherwise;
    for (at += strlen(name); at < body + length && (*at == ' ' || *at == ':'); at++) {}
    if (*at == 't') return 1;
    return *at >= '0' && *at <= '9' ? atol(at) : otherwise;
}

static bool generate(struct connection *c, const char *body, size_t length) {
    c->worker->requests++;
    c->prompt = length / 4;
    c->worker->prompt_tokens += c->prompt;
    c->wanted = (int)field(body, length, "\"max_tokens\"", field(body, length, "\"max_completion_tokens\"", 16));
    if (field(body, length, "\"stream\"", 0)) {
        c->usage = field(body, length, "\"include_usage\"", 0) != 0;
        begin_stream(c, (uint64_t)field(body, length, "\"seed\"", 0) * 1000);
        return true;
    }
    char text[2048], words[600] = "", usage[256];
    while (strlen(words) + 32 < sizeof words) strcat(words, "one more word on the way home, ");
    write_usage(usage, sizeof usage, c->prompt, c->wanted);
    snprintf(text, sizeof text, "{" ID ",\"object\":\"%s\"," CREATED ",\"model\":\"%s\",\"choices\":[{\"index\":0,%s%s%s\"logprobs\":null,\"finish_reason\":\"length\","
             "\"stop_reason\":null}],\"system_fingerprint\":\"vllm-0.32.0-bench\",\"service_tier\":null,%s}",
             c->chat ? "chat.completion" : "text_completion", persona.model, c->chat ? "\"message\":{\"role\":\"assistant\",\"content\":\"" : "\"text\":\"", words,
             c->chat ? "\",\"refusal\":null,\"reasoning\":null,\"tool_calls\":[]}," : "\",", usage);
    return answer_json(c, text);
}

/* One made-up token per 4 bytes, always the same for the same bytes, so that equal prefixes stay equal. */
static bool tokenize(struct connection *c, const char *opening, const char *body, size_t length) {
    char *text = malloc(length / 4 * 6 + 512), *to = text;
    to += sprintf(to, opening, length / 4);
    for (size_t i = 0; i + 4 <= length; i += 4) {
        uint32_t four;
        memcpy(&four, body + i, 4);
        uint32_t token = (four * 2654435761u >> 12) % 90000 + 10000;
        if (i) *to++ = ',';
        for (int digit = 4; digit >= 0; digit--, token /= 10) to[digit] = (char)('0' + token % 10);
        to += 5;
    }
    strcpy(to, "]}");
    bool sent = answer_json(c, text);
    free(text);
    return sent;
}

static bool show_metrics(struct connection *c) {
    char text[4096];
    const struct worker *w = c->worker;
    size_t n = 0;
    const struct { const char *name, *type; double value; } rows[] = {
        {"num_requests_running", "gauge", w->active}, {"num_requests_waiting", "gauge", 0}, {"kv_cache_usage_perc", "gauge", 0.25},
        {"prompt_tokens_total", "counter", (double)w->prompt_tokens}, {"prompt_tokens_created", "gauge", persona.started_at},
        {"generation_tokens_total", "counter", (double)w->chunks}, {"request_success_total", "counter", (double)w->requests}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "# TYPE vllm:%s %s\nvllm:%s{engine=\"0\",model_name=\"%s\"} %.3f\n",
                              rows[i].name, rows[i].type, rows[i].name, persona.model, rows[i].value);
    n += (size_t)snprintf(text + n, sizeof text - n, "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\","
                          "enable_prefix_caching=\"True\",engine=\"0\",num_gpu_blocks=\"65536\"} 1.0\n");
    return answer(c, 200, "text/plain; version=0.0.4; charset=utf-8", text, n);
}

static bool show(struct connection *c, const char *path) {
    char text[1024];
    const struct worker *w = c->worker;
    const char *model = persona.model;
    if (!strcmp(path, "/metrics")) return show_metrics(c);
    if (!strcmp(path, "/version")) return answer_json(c, "{\"version\":\"0.32.0\"}");
    if (!strcmp(path, "/") || !strcmp(path, "/ping") || !strncmp(path, "/health", 7)) return answer_json(c, "{}");
    if (!strcmp(path, "/v1/models"))
        snprintf(text, sizeof text, "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\"," CREATED ",\"owned_by\":\"vllm\","
                 "\"root\":\"%s\",\"parent\":null,\"max_model_len\":%d,\"permission\":[]}]}", model, model, persona.longest_prompt);
    else if (!strcmp(path, "/fake/stats"))
        snprintf(text, sizeof text, "{\"port\":%d,\"requests\":%llu,\"streams\":%llu,\"chunks\":%llu,\"aborted\":%llu,\"active\":%d}",
                 w->port, w->requests, w->streams, w->chunks, w->aborted, w->active);
    else if (strstr(path, "_info")) /* what an SGLang worker tells of itself */
        snprintf(text, sizeof text, "{\"model_path\":\"%s\",\"served_model_name\":\"%s\",\"tokenizer_path\":\"%s\",\"is_generation\":true,\"tp_size\":1,\"dp_size\":1,"
                 "\"max_total_num_tokens\":1048576,\"max_model_len\":%d,\"version\":\"0.5.6\"}", model, model, model, persona.longest_prompt);
    else return refuse(c, 404, "not found");
    return answer_json(c, text);
}

bool route(struct connection *c, const char *head, const char *body, size_t length) {
    char method[8] = "", path[128] = "";
    sscanf(head, "%7s %127[^ ?]", method, path);
    if (strcmp(method, "POST")) return show(c, path);
    c->chat = strstr(path, "/chat/") != NULL;
    if (!strcmp(path, "/v1/chat/completions") || !strcmp(path, "/v1/completions")) return generate(c, body, length);
    if (strstr(path, "/render")) return tokenize(c, "{\"request_id\":\"render-1\",\"tokens\":%zu,\"token_ids\":[", body, length);
    if (!strcmp(path, "/tokenize")) return tokenize(c, "{\"count\":%zu,\"max_model_len\":262144,\"token_strs\":null,\"tokens\":[", body, length);
    return refuse(c, 404, "not found");
}
