/* How the supervisor comes into a container: started there as root with few capabilities, it calls the owner's socket, makes the
   folders that a sandbox has, gives up root, and filters its system calls. Then it is the same as elsewhere.

   warden join SOCKET FILTER UID PROCESSES DATA FILES */
#define _GNU_SOURCE
#include "warden.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static void call(const char *path) {
    struct sockaddr_un where = {.sun_family = AF_UNIX};
    strncpy(where.sun_path, path, sizeof where.sun_path - 1);
    int line = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (line < 0 || connect(line, (struct sockaddr *)&where, sizeof where)) fail(path);
    if (line != CONTROL && dup2(line, CONTROL) < 0) fail("the control socket");
}

static void make(const char *folder, uid_t owner) {
    if (mkdir(folder, 0755) && errno != EEXIST) fail(folder);
    if (chown(folder, owner, owner)) fail(folder);
}

static void filter_calls(const char *path) {
    static struct sock_filter lines[4096];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, lines, sizeof lines);
    if (size <= 0) fail(path);
    struct sock_fprog program = {.len = size / sizeof *lines, .filter = lines};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) fail("seccomp");
}

int join(int argc, char **argv) {
    if (argc < 6) {
        errno = EINVAL;
        fail("arguments");
    }
    uid_t uid = strtoul(argv[2], NULL, 10);
    call(argv[0]);
    if (!getuid()) {
        make("/work", uid);
        mkdir("/home", 0755);
        make("/home/agent", uid);
        for (int capability = 0; capability < 64; capability++) prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
        if (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid)) fail("giving up root");
    }
    filter_calls(argv[1]);
    return supervise(argc - 3, argv + 3);
}
