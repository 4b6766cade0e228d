"""How the page looks: light and dark, on a screen, a phone and on paper."""

from __future__ import annotations

_LIGHT = """
  --page: #f6f7f9; --card: #ffffff; --ink: #17202c; --dim: #5a6675; --faint: #8893a1; --line: #e1e5ea; --soft: #eef1f5;
  --good: #1a7f4e; --warn: #9a5b00; --bad: #b3261e; --live: #1f63c9;
  --k0: #1f63c9; --k1: #c4560a; --k2: #16845a; --k3: #8a3ffc; --k4: #b0206a; --k5: #0f7c90; --k6: #7a6a00;
  --k7: #5b6675;
"""
_DARK = """
  --page: #0f1319; --card: #171c24; --ink: #e8ecf1; --dim: #a3afbd; --faint: #7d8998; --line: #2a323d; --soft: #1f2630;
  --good: #4fcf9c; --warn: #f0b455; --bad: #ff8a80; --live: #7db4ff;
  --k0: #7db4ff; --k1: #f7a35c; --k2: #4fcf9c; --k3: #bf9bff; --k4: #ff8ac0; --k5: #5fd0e4; --k6: #d9c74a;
  --k7: #a3afbd;
"""
_NUMBERS = range(8)
_KEYS = "".join(
    f".stroke.k{n}{{stroke:var(--k{n})}}.dot.k{n},.piece.k{n}{{fill:var(--k{n})}}.key.k{n}{{background:var(--k{n})}}\n"
    for n in _NUMBERS
)
_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif;
  font-variant-numeric:tabular-nums}
main{max-width:1080px;margin:0 auto;padding:28px 24px 40px}
header{margin-bottom:20px}
.kicker{color:var(--dim);font-size:13px;letter-spacing:.02em;margin:0 0 6px}
.name{display:flex;flex-wrap:wrap;align-items:center;gap:4px 14px}
h1{font-size:30px;line-height:1.2;margin:0;overflow-wrap:anywhere;letter-spacing:-.01em}
.badge{font-size:13px;font-weight:600;padding:3px 12px;border-radius:99px;border:1px solid currentColor;
  color:var(--dim)}
.sentence{font-size:19px;line-height:1.45;margin:12px 0 8px;max-width:62em;overflow-wrap:anywhere}
.facts{color:var(--dim);margin:0;font-size:14px;overflow-wrap:anywhere}
.facts span:not(:last-child)::after{content:"·";margin:0 8px;color:var(--faint)}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}.live{color:var(--live)}
section{margin-top:30px}
h2{font-size:19px;margin:0 0 12px;letter-spacing:-.005em}
h3{font-size:14px;margin:0 0 8px;font-weight:600}
p{margin:0 0 10px;max-width:72em;overflow-wrap:anywhere}
p.small{color:var(--dim);font-size:13.5px}
.card,figure,.bars,details{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:10px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px 11px;min-width:0}
.tile .label{color:var(--dim);font-size:13px}
.tile .value{font-size:23px;font-weight:650;line-height:1.25;overflow-wrap:anywhere;letter-spacing:-.01em}
.tile .note{color:var(--dim);font-size:12.5px;line-height:1.4;overflow-wrap:anywhere}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:12px}
figure{margin:0;padding:12px 12px 6px;min-width:0}
figcaption{display:flex;justify-content:space-between;align-items:baseline;gap:10px;font-size:14px;font-weight:600}
figure .keys{margin:4px 0 0;gap:0 14px}
figcaption .note{color:var(--dim);font-weight:400;font-size:13px;text-align:right}
p+.scroll{margin-top:0}
.gallery+p,.gallery+.scroll,.gallery+.gallery{margin-top:14px}
.bars+.keys{margin-top:14px}
svg.chart{display:block;width:100%;height:auto;margin-top:6px}
svg text{fill:var(--dim);font-size:11.5px}
.grid{stroke:var(--line)}.axis{stroke:var(--faint)}
.stroke{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}
.stroke.faint{stroke-width:.8;opacity:.28}
.stroke.lost{stroke:var(--faint);stroke-width:1.2;stroke-dasharray:3 3}
.dot{stroke:var(--card);stroke-width:1.2}
.save{fill:var(--good)}
line.stop{stroke:var(--bad);stroke-width:1.3;stroke-dasharray:4 3}
.keys{display:flex;flex-wrap:wrap;gap:2px 18px;color:var(--dim);font-size:13px;margin:0 0 10px;padding:0;
  list-style:none}
.keys li{display:flex;align-items:center;gap:7px}
.key{width:16px;height:4px;border-radius:2px;background:var(--faint);flex:none;print-color-adjust:exact;
  -webkit-print-color-adjust:exact}
.key.block{height:10px;width:10px}
.key.held{width:9px;height:9px;border-radius:50%;background:var(--k1)}
.key.any{width:9px;height:9px;border-radius:50%}
.key.save{width:0;height:0;border:5px solid transparent;border-top:0;border-bottom:8px solid var(--good);
  border-radius:0;background:none}
.key.stop{width:0;height:14px;border-left:2px dashed var(--bad);border-radius:0;background:none}
.key.lost{height:0;border-top:2px dashed var(--faint);border-radius:0;background:none}
.bars{padding:12px 14px 12px;margin-bottom:12px}
.bar{display:grid;grid-template-columns:minmax(70px,max-content) 1fr minmax(64px,max-content);gap:2px 12px;
  align-items:center;font-size:13.5px;padding:3px 0}
.bars .rows{display:grid;grid-template-columns:minmax(60px,max-content) 1fr max-content}
.bars .bar{display:grid;grid-column:1/-1;grid-template-columns:subgrid}
.bar .label{color:var(--dim);overflow-wrap:anywhere;max-width:22em}
.bar .value{text-align:right}
.bar svg{display:block;width:100%;height:16px;background:var(--soft);border-radius:4px;
  print-color-adjust:exact;-webkit-print-color-adjust:exact}
.piece{fill:var(--faint)}
.piece.used{fill:var(--k0)}.piece.slow,.piece.bad{fill:var(--bad)}.piece.wait{fill:var(--k1)}
.piece.save{fill:var(--good)}.piece.away{fill:none}.piece.held{fill:var(--k1)}.piece.said{fill:var(--k7)}
.key.used{background:var(--k0)}.key.slow,.key.bad{background:var(--bad)}.key.wait{background:var(--k1)}
.key.said{background:var(--k7)}.key.away{background:var(--soft);border:1px solid var(--line)}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px;margin-bottom:12px}
table{border-collapse:collapse;width:100%;font-size:14px}
th{color:var(--dim);font-weight:600;font-size:13px;text-align:left;white-space:nowrap}
th,td{padding:7px 14px;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
td{overflow-wrap:break-word}
td.brief{white-space:nowrap}td.long{min-width:15em}
td:first-child code{white-space:nowrap}
.pairs{width:fit-content;min-width:min(100%,26em);max-width:100%}
.pairs td:first-child{color:var(--dim)}
.right{text-align:right;white-space:nowrap}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:13px}
pre{background:var(--soft);border:1px solid var(--line);border-radius:8px;padding:11px 14px;margin:0 0 12px;
  white-space:pre-wrap;overflow-wrap:anywhere}
details{padding:0;margin-bottom:12px}
summary{cursor:pointer;padding:10px 14px;font-weight:600;font-size:14px}
summary:focus-visible{outline:2px solid var(--live);outline-offset:-2px;border-radius:10px}
details .scroll{border:0;border-top:1px solid var(--line);border-radius:0 0 10px 10px;margin:0}
details>p{padding:0 14px}
.callout{background:var(--card);border:1px solid var(--line);border-left:4px solid currentColor;border-radius:8px;
  padding:9px 14px;margin-bottom:12px}
.callout p{color:var(--ink);margin:0}
footer{margin-top:36px;color:var(--faint);font-size:13px;border-top:1px solid var(--line);padding-top:12px}
@media (max-width:560px){
  main{padding:18px 14px 28px} h1{font-size:24px} .sentence{font-size:17px}
  .tiles{grid-template-columns:repeat(2,1fr)} .tile .value{font-size:20px} th,td{padding:7px 10px}
  figure{padding:10px 8px 4px}
}
@media print{
  body{font-size:11px} main{max-width:none;padding:0} section{break-inside:auto;margin-top:18px}
  h2,h3{break-after:avoid} figure,.tile,.bars,tr,.callout{break-inside:avoid}
  .gallery{grid-template-columns:1fr 1fr} .scroll{overflow:visible}
}
"""

CSS = (
    f":root{{color-scheme:light dark;{_LIGHT}}}\n@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}\n"
    # Paper is white whatever the screen is.
    f"@media print{{:root{{color-scheme:light;{_LIGHT}--page:#ffffff}}}}\n{_RULES}{_KEYS}"
)
