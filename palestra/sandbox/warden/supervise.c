/* The inner half: PID 1 of the sandbox. It starts commands, opens files and reaps orphans, as messages on one socket ask for.
   Signals from inside do not reach it, nobody inside can look into it, and when the owner hangs up it ends, and all with it.

   warden supervise PROCESSES DATA FILES: the limits of each command, 0 for none. A message is a header and strings that end in
   NUL; descriptors travel beside it. */
#define _GNU_SOURCE
#include "warden.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RUN = 1, KILL = 2, READ = 3, WRITE = 4 };                      /* what the owner asks for */
enum { READY = 1, FAILED = 2, EXITED = 3, OPENED = 4 };               /* what it hears */
enum { AT_FOLDER = 1, AT_PROGRAM = 2, AT_FORK = 3 };                  /* where a command failed */
enum { LIVE_MOST = 256, MESSAGE_MOST = 262144, WORDS_MOST = 16384, PASSES_MOST = 40, PASS_MS = 5 };

struct request { uint32_t op, id, milliseconds, argc, envc; };
struct reply { uint32_t kind, id; int32_t value; uint32_t more; };

static struct command {
    uint32_t id;
    pid_t pid;                  /* 0 when the slot is free */
    unsigned long long started; /* in ticks, as /proc tells it */
    int64_t due;                /* in milliseconds; 0 for never */
    int passes, status, ended;
} live[LIVE_MOST];

static char message[MESSAGE_MOST + 1];
static rlim_t limit_processes, limit_data, limit_files;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static unsigned long long ticks(void) {
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return t.tv_sec * 100ULL + t.tv_nsec / 10000000;
}

static void say(uint32_t kind, uint32_t id, int value, uint32_t more, int fd) {
    struct reply reply = {kind, id, value, more};
    struct iovec part = {&reply, sizeof reply};
    union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } room;
    struct msghdr out = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        out.msg_control = room.bytes;
        out.msg_controllen = sizeof room.bytes;
        struct cmsghdr *head = CMSG_FIRSTHDR(&out);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(head), &fd, sizeof fd);
    }
    while (sendmsg(CONTROL, &out, MSG_NOSIGNAL) < 0)
        if (errno != EINTR) _exit(1);
}

static void bound(int resource, rlim_t value) {
    struct rlimit limit = {value, value};
    if (value) setrlimit(resource, &limit);
}

static _Noreturn void become(uint32_t id, char *folder, char **argv, char **envp, int *fds) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    for (int i = 0; i < 3; i++) dup2(fds[i], i);
    setrlimit(RLIMIT_CORE, &(struct rlimit){1, 1}); /* 1 and not 0: then a handler on the host is not called either */
    bound(RLIMIT_NOFILE, limit_files);
    bound(RLIMIT_DATA, limit_data);
    if (chdir(folder)) {
        say(FAILED, id, errno, AT_FOLDER, -1);
        _exit(126);
    }
    bound(RLIMIT_NPROC, limit_processes);
    environ = envp;
    execvp(argv[0], argv);
    say(FAILED, id, errno, AT_PROGRAM, -1);
    _exit(127);
}

/* Where what earlier commands left behind fills the sandbox, it goes. */
static pid_t fork_even_if_crowded(void) {
    pid_t pid = fork();
    for (int i = 0; pid < 0 && errno == EAGAIN && i < 100; i++) {
        for (int j = 0; j < LIVE_MOST; j++)
            if (live[j].pid) return -1;
        kill(-1, SIGKILL);
        while (waitpid(-1, NULL, WNOHANG) > 0) continue;
        usleep(5000);
        pid = fork();
    }
    return pid;
}

static void run(struct request *ask, char *text, char *end, int *fds) {
    static char *words[WORDS_MOST];
    struct command *slot = NULL;
    uint32_t count = 0, wanted = ask->argc + ask->envc + 1;
    for (char *at = text; at < end && count < WORDS_MOST - 2; at += strlen(at) + 1) words[count++] = at;
    if (count != wanted || !ask->argc) {
        say(FAILED, ask->id, E2BIG, AT_PROGRAM, -1);
        return;
    }
    memmove(words + ask->argc + 2, words + ask->argc + 1, ask->envc * sizeof *words); /* room for the NULL behind the words */
    words[ask->argc + 1] = words[wanted + 1] = NULL;
    for (int i = 0; i < LIVE_MOST && !slot; i++)
        if (!live[i].pid) slot = &live[i];
    unsigned long long started = ticks();
    pid_t pid = slot ? fork_even_if_crowded() : (errno = EAGAIN, -1);
    if (!pid) become(ask->id, words[0], words + 1, words + ask->argc + 2, fds);
    if (pid < 0) say(FAILED, ask->id, errno, AT_FORK, -1);
    else *slot = (struct command){.id = ask->id, .pid = pid, .started = started, .due = now() + ask->milliseconds};
}

static int open_file(char *path, int writing) {
    struct stat status;
    struct statfs system;
    if (writing)
        for (char *at = strchr(path + 1, '/'); at; at = strchr(at + 1, '/')) {
            *at = 0;
            if (mkdir(path, 0755) && errno != EEXIST && errno != EROFS && errno != EACCES) return -1;
            *at = '/';
        }
    int flags = writing ? O_WRONLY | O_CREAT : O_RDONLY;
    int fd = open(path, flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0644); /* a FIFO or a lease must not make us wait */
    if (fd < 0) return -1;
    int wrong = fstat(fd, &status) || fstatfs(fd, &system)        ? errno
                : S_ISDIR(status.st_mode)                          ? EISDIR
                : !S_ISREG(status.st_mode) || system.f_type == PROC_SUPER_MAGIC ? ENOTSUP
                                                                   : 0;
    if (!wrong) return fd;
    close(fd);
    errno = wrong;
    return -1;
}

/* parent and start time of a process; 0 when it has ended */
static int look(pid_t pid, pid_t *parent, unsigned long long *started) {
    char path[32], line[1024], *rest, state;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, line, sizeof line - 1);
    if (fd >= 0) close(fd);
    if (size <= 0) return 0;
    line[size] = 0;
    rest = strrchr(line, ')'); /* a name may hold anything */
    return rest
        && sscanf(rest + 2, "%c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, parent, started) == 3
        && state != 'Z' && state != 'X';
}

static int is_live(pid_t pid) {
    for (int i = 0; i < LIVE_MOST; i++)
        if (live[i].pid == pid) return 1;
    return 0;
}

/* Whether a command started this process: it descends from it, or it is an orphan that is younger than the command. */
static int started_by(struct command *c, pid_t pid) {
    pid_t parent;
    unsigned long long started, own = 0;
    for (pid_t at = pid; at > 1; at = parent) {
        if (at == c->pid) return 1;
        if (!look(at, &parent, &started)) return own >= c->started && own;
        if (at == pid) own = started;
        if (parent == 1) return !is_live(at) && own >= c->started && started >= c->started;
    }
    return 0;
}

static int kill_all(struct command *c) {
    DIR *folder = opendir("/proc");
    pid_t parent;
    unsigned long long started;
    int found = 0;
    if (!folder) return 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        pid_t pid = atoi(entry->d_name);
        if (pid > 1 && look(pid, &parent, &started) && started_by(c, pid)) {
            kill(pid, SIGKILL);
            found++;
        }
    }
    closedir(folder);
    return found;
}

static void reap(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (int i = 0; i < LIVE_MOST; i++)
            if (live[i].pid == pid) {
                live[i].status = status;
                live[i].ended = 1;
                if (live[i].passes) break; /* it is being killed: the answer waits for its descendants */
                say(EXITED, live[i].id, status, 0, -1);
                live[i].pid = 0;
                break;
            }
}

/* Kill what is overdue, again and again until nothing of it is left; one that outruns us takes everything inside with it. */
static int tend(void) {
    int64_t time = now(), next = -1;
    for (int i = 0; i < LIVE_MOST; i++) {
        struct command *c = &live[i];
        if (!c->pid) continue;
        if (c->due <= time) {
            int found = kill_all(c);
            if (++c->passes > PASSES_MOST) kill(-1, SIGKILL);
            reap();
            if (!found && c->ended) {
                say(EXITED, c->id, c->status, 1, -1);
                c->pid = 0;
                continue;
            }
            c->due = time + PASS_MS;
        }
        if (next < 0 || c->due - time < next) next = c->due - time;
    }
    return next < 0 ? -1 : next > 3600000 ? 3600000 : (int)next;
}

static void obey(ssize_t size, int *fds, int count) {
    struct request ask;
    if (size < (ssize_t)sizeof ask) return;
    memcpy(&ask, message, sizeof ask);
    message[size] = 0;
    char *text = message + sizeof ask, *end = message + size;
    if (ask.op == RUN && count == 3) run(&ask, text, end, fds);
    else if (ask.op == KILL) {
        for (int i = 0; i < LIVE_MOST; i++)
            if (live[i].pid && live[i].id == ask.id) live[i].due = 0;
    } else if (ask.op == READ || ask.op == WRITE) {
        int fd = open_file(text, ask.op == WRITE);
        say(OPENED, ask.id, fd < 0 ? errno : 0, 0, fd);
        if (fd >= 0) close(fd);
    }
}

static void hear(void) {
    struct iovec part = {message, MESSAGE_MOST};
    union { char bytes[CMSG_SPACE(3 * sizeof(int))]; struct cmsghdr align; } room;
    struct msghdr in = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room.bytes, .msg_controllen = sizeof room.bytes};
    int fds[3], count = 0;
    ssize_t size = recvmsg(CONTROL, &in, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size <= 0) _exit(0); /* the owner is gone, and the kernel now ends everything inside */
    struct cmsghdr *head = CMSG_FIRSTHDR(&in);
    if (head && head->cmsg_type == SCM_RIGHTS) {
        count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(fds, CMSG_DATA(head), count * sizeof(int));
    }
    obey(size, fds, count);
    for (int i = 0; i < count; i++) close(fds[i]);
}

int supervise(int argc, char **argv) {
    sigset_t child;
    if (argc < 3) fail("arguments");
    limit_processes = strtoull(argv[0], NULL, 10);
    limit_data = strtoull(argv[1], NULL, 10);
    limit_files = strtoull(argv[2], NULL, 10);
    prctl(PR_SET_DUMPABLE, 0); /* nobody inside reads our memory, descriptors or environment */
    fcntl(CONTROL, F_SETFD, FD_CLOEXEC);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK), null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (signals < 0 || null < 0) fail("supervise");
    for (int i = 0; i < 3; i++) dup2(null, i);
    for (int i = CONTROL + 1; i < 16; i++)
        if (i != signals) close(i);
    umask(022);
    say(READY, 0, 0, 0, -1);
    for (struct pollfd at[2] = {{CONTROL, POLLIN, 0}, {signals, POLLIN, 0}};;) {
        char buffer[sizeof(struct signalfd_siginfo) * 4];
        poll(at, 2, tend());
        if (at[1].revents && read(signals, buffer, sizeof buffer) >= 0) reap();
        if (at[0].revents) hear();
    }
}
