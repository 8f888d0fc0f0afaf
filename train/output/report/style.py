"""How a report looks: calm and dense, light and dark, on a phone and on paper."""

COLOURS = 8
"""Of runs; after them the same again, in dashes."""
DASHES = 3
"""Of lines: whole and two kinds of broken ones."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1b1d20; --muted: #5b6066; --rule: #d8dbdf; --tint: #f4f5f7;
  --c0: #1f6fb4; --c1: #c2410c; --c2: #15803d; --c3: #9333a8;
  --c4: #856a00; --c5: #0e7c86; --c6: #be185d; --c7: #57534e;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #16181b; --text: #e7e8ea; --muted: #a2a8af; --rule: #383c42; --tint: #1f2226;
    --c0: #6cb2ee; --c1: #f59461; --c2: #5fc98a; --c3: #d08ee6;
    --c4: #d9b944; --c5: #58c4cf; --c6: #f47fb1; --c7: #b5b0aa;
  }
}
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 1.25rem 1.25rem 3rem; max-width: 76rem;
  background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: break-word;
}
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; padding-top: .6rem;
  border-top: 1px solid var(--rule); }
p { margin: .3rem 0; max-width: 60rem; }
a { color: var(--c0); }
nav { margin: .6rem 0 0; font-size: .9rem; }
nav a { margin-right: .9rem; white-space: nowrap; }
.muted, figcaption, .caption, dt { color: var(--muted); }
.notes { margin: .4rem 0; padding-left: 1.1rem; color: var(--muted); font-size: .9rem; }
.unfinished { border-left: 3px solid var(--c1); padding-left: .6rem; }
:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }

.figures { display: grid; gap: .8rem 1rem; margin: 1rem 0 .4rem;
  grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); }
.figures dt { font-size: .8rem; }
.figures dd { margin: 0; font-size: 1.3rem; line-height: 1.25; }
.states { list-style: none; margin: .6rem 0; padding: 0; }
.figures dd small, td small { display: block; font-size: .8rem; color: var(--muted); }

.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .875rem; margin: .3rem 0; }
.caption, .table { margin-top: .8rem; }
th, td { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; }
tr > * { border-bottom: 1px solid var(--rule); }
thead th { font-weight: 600; color: var(--muted); vertical-align: bottom; }
tbody th { font-weight: 400; }
th.name { min-width: 8rem; max-width: 22rem; overflow-wrap: anywhere; }
table.wide { width: 100%; max-width: 50rem; }
.wide td { white-space: nowrap; }
.beside td { min-width: 5.5rem; }
.number { text-align: right; white-space: nowrap; }
.wide .bar { min-width: 4rem; width: 45%; padding-right: 0; }
.bar svg { display: block; width: 100%; height: .75rem; margin-top: .25rem; }
th.number, td small { white-space: normal; }
.best, .changed { font-weight: 600; }

.charts { display: grid; gap: 1.1rem 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figcaption, .caption { font-size: .85rem; max-width: 60rem; }
figcaption .title { color: var(--text); font-weight: 600; }
.readout .at { color: var(--muted); }
.readout { display: flex; flex-wrap: wrap; gap: 0 .9rem; min-height: 1.3rem; color: var(--text); }
.readout .item { white-space: nowrap; }
.label { display: inline-block; max-width: 11rem; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; vertical-align: bottom; }
.key { width: 1.2rem; height: .6rem; margin-right: .25rem; vertical-align: middle; }
.chart > svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
.chart text { font-size: 10.5px; fill: var(--muted); }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke: var(--c); stroke-width: 1.5; stroke-linejoin: round; }
.dots { fill: none; stroke: var(--c); stroke-width: 5; stroke-linecap: round; }
.several .light { stroke-width: 1; opacity: .65; }
.dash1 { stroke-dasharray: 6 3; } .dash2 { stroke-dasharray: 2 2.5; }
.band { fill: var(--c); opacity: .2; }
.area { fill: var(--c); opacity: .3; }
.fill { fill: var(--c); }
.mark { stroke: var(--c1); stroke-width: 1; stroke-dasharray: 5 3; }
.cursor line { stroke: var(--muted); stroke-width: 1; }
.cursor circle { fill: var(--page); stroke: var(--c); stroke-width: 1.5; }

.runs { position: sticky; top: 0; z-index: 1; margin: 0 0 .8rem; padding: .35rem 0; border: 0;
  border-bottom: 1px solid var(--rule); background: var(--page); font-size: .9rem;
  max-height: 30vh; overflow-y: auto; }
.runs legend { position: absolute; clip-path: inset(50%); width: 1px; height: 1px;
  overflow: hidden; }
.runs label { margin-right: 1rem; white-space: nowrap; }

.pairs { columns: 18rem; column-gap: 2rem; margin: .3rem 0; font-size: .875rem; }
.pairs div { break-inside: avoid; display: flex; gap: .6rem; border-bottom: 1px solid var(--rule);
  padding: .05rem 0; }
.pairs dt { flex: 1 1 auto; }
.pairs dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
.halves { display: grid; gap: 1rem 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.halves > * { min-width: 0; }
.halves .bar { width: 28%; }
.halves .chart > svg { max-width: 30rem; }
.pictures { display: grid; gap: 1.2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.pictures img { display: block; max-width: 100%; height: auto; background: #fff; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--muted); }
footer { margin-top: 2.5rem; border-top: 1px solid var(--rule); padding-top: .5rem;
  font-size: .8rem; color: var(--muted); }

@media (max-width: 40rem) { body { padding: .9rem .8rem 2rem; } }
@page { margin: 14mm; }
@media print {
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  .runs { position: static; max-height: none; }
  .runs input { display: none; }
  .scroll { overflow: visible; }
  h2 { break-after: avoid; }
  tr, .figures div { break-inside: avoid; }
  .charts, .pictures { grid-template-columns: repeat(2, 1fr); }
}
"""


def hiding(runs: int) -> str:
    """CSS by which the boxes ``show0``, ``show1``, ... hide what is of their run.

    In CSS, so that it works without the script.
    """
    return "".join(
        f"body:has(#show{i}:not(:checked)) .run{i} {{ display: none; }}\n" for i in range(runs)
    )
