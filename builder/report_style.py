"""The style of build_report.html: one sheet, light and dark, no fonts from outside."""

STYLE = """
:root {
  --ground: #fff; --ink: #1c2024; --quiet: #60646c; --line: #e0e3e8; --panel: #f6f7f9;
  --s0: #2a6fdb; --s1: #d9822b; --s2: #2f9e6e; --s3: #a04bc0; --s4: #c94f5a; --s5: #7a7f87;
  --good: #18794e; --good-ground: #e6f6ec; --bad: #b3261e; --bad-ground: #fdebea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171a; --ink: #e8eaed; --quiet: #9aa0a8; --line: #2c3137; --panel: #1c2024;
    --s0: #6ea8ff; --s1: #f0a75a; --s2: #5cc99a; --s3: #c98be3; --s4: #ef8a92; --s5: #9aa0a8;
    --good: #6fd6a2; --good-ground: #12321f; --bad: #ff9a92; --bad-ground: #3d1715;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 920px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 10px; }
p { margin: 6px 0 10px; overflow-wrap: anywhere; }
small, .note, .legend, .axis, summary { color: var(--quiet); }
.note { border-left: 3px solid var(--s1); padding-left: 10px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-weight: 600; color: var(--quiet); font-size: 13px; }
th, td { text-align: left; padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
.n { text-align: right; padding-right: 0; padding-left: 12px; }
.badge { font-size: 13px; font-weight: 600; padding: 2px 9px; border-radius: 10px; white-space: nowrap; }
h1 .badge { vertical-align: 4px; margin-left: 8px; }
.good { color: var(--good); background: var(--good-ground); }
.bad { color: var(--bad); background: var(--bad-ground); }
dl { margin: 0; }
dt { color: var(--quiet); font-size: 13px; }
dd { margin: 0; overflow-wrap: anywhere; }
.cards { display: flex; flex-wrap: wrap; gap: 10px; }
.cards div { background: var(--panel); border-radius: 8px; padding: 10px 16px; min-width: 110px; }
.cards dd { font-size: 18px; font-weight: 600; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 10px 20px; }
.legend span { margin-right: 18px; white-space: nowrap; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.bar { display: grid; grid-template-columns: 90px 1fr 84px; align-items: center; gap: 8px; margin: 4px 0; }
.bar svg { width: 100%; height: 18px; background: var(--panel); border-radius: 3px; display: block; }
.plot { width: 100%; height: auto; display: block; }
.plot line { stroke: var(--line); }
.plot text { fill: var(--quiet); font-size: 12px; font-family: inherit; }
details { margin: 8px 0; }
summary { cursor: pointer; }
pre { background: var(--panel); padding: 12px; border-radius: 8px; overflow-x: auto; font-size: 12px;
  line-height: 1.4; }
.s0 { fill: var(--s0); background: var(--s0); } .s1 { fill: var(--s1); background: var(--s1); }
.s2 { fill: var(--s2); background: var(--s2); } .s3 { fill: var(--s3); background: var(--s3); }
.s4 { fill: var(--s4); background: var(--s4); } .s5 { fill: var(--s5); background: var(--s5); }
@media print { details { display: block; } }
"""
