/* The two halves of the warden. `launch` prepares the layers outside and becomes bwrap; `supervise` is PID 1 inside, and in a
   container comes there by `join`. */
#ifndef WARDEN_H
#define WARDEN_H

#define CONTROL 3 /* the socket to the owner, in both halves */
#define SELF 4    /* this program, so that bwrap can run it inside without a path */
#define FILTER 5  /* the seccomp program, for bwrap */

int launch(int argc, char **argv);
int join(int argc, char **argv);
int supervise(int argc, char **argv);
_Noreturn void fail(const char *what);

#endif
