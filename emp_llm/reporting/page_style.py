"""The look of the report page: its style sheet, for light and dark screens, and the colours of figures inside it."""

import re

# Colours of the figures -> (variable, value on a dark page). On a light page they keep their values.
_THEME = {
    "#ffffff": ("paper", "#16181c"),
    "#000000": ("ink", "#e8e8e8"),
    "#666666": ("faint", "#a6a9ae"),
    "#dddddd": ("grid", "#3a3d42"),
    "#eeeeee": ("empty", "#2a2d31"),
    "#00664b": ("better", "#5fd3ae"),
    "#0072b2": ("blue", "#4fa8e0"),
    "#d55e00": ("red", "#ff8b42"),
    "#009e73": ("green", "#35c79c"),
    "#cc79a7": ("pink", "#e39cc5"),
    "#e69f00": ("orange", "#f0b73a"),
    "#56b4e9": ("sky", "#a3d8f7"),
}
_COLOUR = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})")


def themed(svg: str) -> str:
    """A figure with its colours as variables of the page, so that it is dark on a dark page. Others, such as a map's, stay."""

    def variable(match: re.Match[str]) -> str:
        name, colour = match.groups()
        return f"{name}: var(--{_THEME[colour][0]})" if colour in _THEME else match.group(0)

    return _COLOUR.sub(variable, svg)


def _variables(dark: bool) -> str:
    return " ".join(f"--{name}: {value if dark else colour};" for colour, (name, value) in _THEME.items())


STYLE = f"""
:root {{ color-scheme: light dark; --rule: #d4d7db; --tile: #f5f6f8; {_variables(dark=False)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --rule: #3a3d42; --tile: #1f2227; {_variables(dark=True)} }} }}
* {{ box-sizing: border-box; }}
body {{ color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; max-width: 1120px;
  margin: 1.5em auto; padding: 0 1em; overflow-wrap: break-word; }}
h1 {{ font-size: 1.5em; margin: 0 0 0.5em; line-height: 1.25; }}
h2 {{ font-size: 1.25em; border-bottom: 1px solid var(--rule); margin: 1.2em 0 0.6em; line-height: 1.3; }}
h3 {{ font-size: 1.05em; margin: 1.6em 0 0.5em; }} h2 + h3 {{ margin-top: 0.6em; }}
h4 {{ font-size: 13px; margin: 0 0 0.3em; color: var(--faint); font-weight: 600; }}
p {{ margin: 0.6em 0; }} ul {{ padding-left: 1.2em; }} li {{ margin: 0.3em 0; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 280px), 1fr)); gap: 12px; }}
.tile {{ background: var(--tile); border: 1px solid var(--rule); border-radius: 6px; padding: 10px 14px; }}
.tile p {{ margin: 0.15em 0; }} .tile p.note {{ margin-top: 0.5em; }}
.tile b {{ font-size: 1.2em; font-variant-numeric: tabular-nums; white-space: nowrap; margin-right: 0.25em; }}
.facts {{ display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 1em 0; font-size: 13px; }}
.facts div {{ min-width: 0; }} dt {{ display: inline; color: var(--faint); }} dt::after {{ content: ":"; }}
dd {{ display: inline; margin: 0 0 0 0.3em; }}
.wide {{ overflow-x: auto; max-width: 100%; background:
  linear-gradient(to left, var(--paper) 12px, transparent) right / 36px 100% no-repeat local,
  linear-gradient(to left, var(--rule), transparent) right / 14px 100% no-repeat scroll; }}
.wide:focus-visible {{ outline: 2px solid var(--blue); outline-offset: 2px; }}
table {{ border-collapse: separate; border-spacing: 0; font-size: 13px; font-variant-numeric: tabular-nums; margin: 0.3em 0; }}
th, td {{ padding: 4px 8px; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top; }}
td {{ white-space: nowrap; }} th {{ font-weight: 600; }} tbody tr:hover td {{ background: var(--tile); }}
th {{ vertical-align: bottom; }} th.long {{ min-width: 8.5em; text-wrap: balance; }}
.text {{ text-align: left; }} td.text.long {{ white-space: normal; min-width: 17em; }}
th:first-child, td:first-child {{ text-align: left; position: sticky; left: 0; background: var(--paper); }}
figure {{ margin: 1.5em 0; max-width: 880px; }} figure svg {{ display: block; width: 100%; min-width: 620px; height: auto;
  fill: var(--ink); }}
figcaption, .note {{ color: var(--faint); font-size: 13px; }}
@media (max-width: 600px) {{ body {{ margin-top: 0.8em; padding: 0 0.8em; }} td.long:first-child {{ position: static; }} }}
@media print {{ .wide {{ overflow: visible; }} figure svg {{ min-width: 0; }} figure, .tile, tr {{ break-inside: avoid; }} }}
""".strip()
