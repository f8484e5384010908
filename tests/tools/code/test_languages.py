"""Definitions in other languages, and what is left of them in files that do not parse."""

from pathlib import Path

import pytest

from palestra.tools.code import CodeIndex

SOURCES = {
    "a.js": (
        """\
import x from './b.js';
// function no() {}
class A extends B {
  f = 1;
  g = () => 2;
  m(a) { const local = 1; }
}
const C = 1, h = function () {
};
export default function k() { function inner() {} }
const s = 'function no() {}';
""",
        [
            "class A 3-7",
            "variable A.f 4-4",
            "method A.g 5-5",
            "method A.m 6-6",
            "variable C 8-8",
            "function h 8-9",
            "function k 10-10",
            "function k.inner 10-10",
            "variable s 11-11",
        ],
    ),
    "b.ts": (
        """\
interface P { x: number; area(): number }
abstract class Q<T> implements P {
  private y: number = 1;
  abstract z(): void;
}
enum E { A }
type U = string;
export const f = async (a: U): Promise<void> => {};
namespace N {
  export function g() {}
}
""",
        [
            "class P 1-1",
            "method P.area 1-1",
            "class Q 2-5",
            "variable Q.y 3-3",
            "method Q.z 4-4",
            "class E 6-6",
            "class U 7-7",
            "function f 8-8",
            "function N.g 10-10",
        ],
    ),
    "c.tsx": (
        """\
export function App() {
  return <div>{x}</div>;
}
""",
        [
            "function App 1-3",
        ],
    ),
    "d.go": (
        """\
package m
import "fmt"
const K = 1
var V int
type S struct {
\tx int
}
type I interface {
\tDo()
}
func (s *S) M() {
\tlocal := 1
}
func F[T any](x T) {}
""",
        [
            "variable K 3-3",
            "variable V 4-4",
            "class S 5-7",
            "class I 8-10",
            "method I.Do 9-9",
            "method S.M 11-13",
            "function F 14-14",
        ],
    ),
    "e.rs": (
        """\
use crate::a;
pub struct S<T> { x: T }
impl<T> S<T> {
    pub fn m(&self) { let x = 1; }
}
trait T1 { fn r(&self); }
enum E { A }
const K: i32 = 1;
mod inner {
    pub fn f() {}
}
macro_rules! mac { () => {} }
fn main() {}
""",
        [
            "class S 2-2",
            "method S.m 4-4",
            "class T1 6-6",
            "method T1.r 6-6",
            "class E 7-7",
            "variable K 8-8",
            "function inner.f 10-10",
            "function mac 12-12",
            "function main 13-13",
        ],
    ),
    "F.java": (
        """\
import a.b.C;
public class F extends G {
  static final int K = 1, L = 2;
  F() {}
  @Override
  public void m(int a) {
    int local = 1;
  }
  interface In { void n(); }
  enum E { X, Y }
}
record R(int a) {}
""",
        [
            "class F 2-11",
            "variable F.K 3-3",
            "variable F.L 3-3",
            "method F.F 4-4",
            "method F.m 5-8",
            "class F.In 9-9",
            "method F.In.n 9-9",
            "class F.E 10-10",
            "variable F.E.X 10-10",
            "variable F.E.Y 10-10",
            "class R 12-12",
        ],
    ),
    "g.c": (
        """\
#include "g.h"
#define K 1
#define MAX(a, b) ((a) > (b))
struct point { int x; };
typedef struct { int y; } size_type;
static int counter = 0;
int *find(struct point *p, int (*f)(int))
{
  int local = 1;
  return 0;
}
int proto(int);
enum color { RED };
""",
        [
            "variable K 2-2",
            "function MAX 3-3",
            "class point 4-4",
            "class size_type 5-5",
            "variable counter 6-6",
            "function find 7-11",
            "class color 13-13",
            "variable color.RED 13-13",
        ],
    ),
    "h.cpp": (
        """\
namespace n {
class A : public B {
 public:
  A() : x(1) {}
  int m() const { return x; }
  void d();
 private:
  int x;
};
void A::d() {}
template <class T> T t(T a) { return a; }
}
using Z = int;
""",
        [
            "class n.A 2-9",
            "method n.A.A 4-4",
            "method n.A.m 5-5",
            "method n.A.d 10-10",
            "function n.t 11-11",
            "class Z 13-13",
        ],
    ),
}


@pytest.mark.parametrize("path", SOURCES)
def test_definitions(path: str, tmp_path: Path) -> None:
    text, expected = SOURCES[path]
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / path).write_text(text, encoding="utf-8")
    index = CodeIndex(tmp_path / "root", tmp_path / "cache")
    found = index.outline(path)
    assert [f"{each.kind} {each.name} {each.start}-{each.end}" for each in found] == expected
    for symbol in found:
        assert symbol in index.symbol(symbol.name)
        assert symbol in index.symbol(symbol.name.rpartition(".")[2], symbol.kind)
    assert index.symbol("no") == index.symbol("local") == []


BROKEN = {
    "a.js": (
        "class A {\n  f() {\n    g(1,\n  }\n  h() {\n  }\n}\nfunction k( {\nclass B {\n  m() {\n  }\n}\n",
        {"A", "h", "B", "m"},
    ),
    "b.ts": ("export class A {\n  f(: void {\n  }\n  g(): void {\n  }\n}\nexport function h() {\n}\n", {"A", "g", "h"}),
    "d.go": ("package m\nfunc A( {\n}\nfunc (s *S) B() {\n}\ntype C struct {\n", {"A", "B", "C"}),
    "e.rs": ("struct A {\nimpl B {\n    fn c(&self) {\n    }\n}\npub fn d() {\n}\n", {"A", "c", "d"}),
    "F.java": ("public class F {\n  void a( {\n  }\n  public int b(int x) {\n  }\n  class C {\n", {"F", "b", "C"}),
    "g.c": ("int a(int x {\n}\nstatic int b(int y)\n{\n}\nstruct c {\n", {"b", "c"}),
}


@pytest.mark.parametrize("path", BROKEN)
def test_what_does_not_parse_is_read_all_the_same(path: str, tmp_path: Path) -> None:
    text, expected = BROKEN[path]
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / path).write_text(text, encoding="utf-8")
    index = CodeIndex(tmp_path / "root", tmp_path / "cache")
    assert expected <= {each.name.rpartition(".")[2] for each in index.outline(path)}
    assert all(index.symbol(name) for name in expected)


def test_references_and_imports(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "util.ts").write_text("export function help() {}\n", encoding="utf-8")
    (root / "main.ts").write_text(
        "import { help } from './lib/util';\n// help\nclass A extends B {\n  m() { return `${help()} help`; }\n}\n",
        encoding="utf-8",
    )
    (root / "lib" / "a.h").write_text("int a(void);\n", encoding="utf-8")
    (root / "a.c").write_text('#include "lib/a.h"\n#include <stdio.h>\nint a(void) { return 1; }\n', encoding="utf-8")
    index = CodeIndex(root, tmp_path / "cache")
    assert [(each.path, each.line, each.use, each.scope) for each in index.references("help")] == [
        ("lib/util.ts", 1, "definition", "help"),
        ("main.ts", 1, "import", ""),
        ("main.ts", 4, "call", "A.m"),
    ]
    assert [each.name for each in index.subclasses("B")] == ["A"]
    assert [each.target for each in index.dependencies("main.ts")[0]] == ["lib/util.ts"]
    assert [each.path for each in index.dependencies("lib/util.ts")[1]] == ["main.ts"]
    assert [(each.module, each.target) for each in index.dependencies("a.c")[0]] == [("lib/a.h", "lib/a.h"), ("stdio.h", "")]
    assert [each.path for each in index.dependencies("lib/a.h")[1]] == ["a.c"]
