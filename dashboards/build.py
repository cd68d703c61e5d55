"""Writes the Grafana dashboard, and the rules as Kubernetes wants them: `python -m dashboards.build`, from the root.

`panels.py` and `ray_panels.py` say what is shown, this file how it is drawn and where it is placed. Needs
grafana-foundation-sdk.
"""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the classic schema, on purpose: old and new Grafana read it
    from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_options
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.panels import ROWS, Panel
from dashboards.ray_panels import RAY_ROWS

TARGET = Path(__file__).parent / "grafana" / "airmoe.json"
RULES = tuple(Path(__file__).parent / "rules" / f"airmoe.{name}.yml" for name in ("rules", "alerts"))
KUBERNETES_RULES = Path(__file__).parents[1] / "configs" / "cluster" / "kuberay-alerts.yaml"
SOURCE = options.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24
# variables at the top of the dashboard, which choose front ends and Ray clusters, and the selectors they become
VARIABLES = {
    "job": "label_values(airmoe_queue_limit, job)",
    "instance": 'label_values(airmoe_queue_limit{job=~"$job"}, instance)',
    "session": "label_values(ray_node_cpu_count, SessionName)",
}
CHOSEN = {"airmoe": 'job=~"$job", instance=~"$instance"', "ray": 'SessionName=~"$session"'}
_SERIES = re.compile(r"\b(airmoe|ray)_(\w+)(?:\{([^}]*)\})?")
Builder = timeseries.Panel | stat.Panel | statetimeline.Panel | heatmap.Panel


def narrowed(query: str) -> str:
    """A query of the front ends and clusters that are chosen: every series in it gets the selectors."""

    def select(found: re.Match[str]) -> str:
        labels = ", ".join(part for part in (CHOSEN[found[1]], found[3]) if part)
        return f"{found[1]}_{found[2]}{{{labels}}}"

    return _SERIES.sub(select, query)


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True).display_mode(options.LegendDisplayMode.LIST)
    return legend.placement(options.LegendPlacement.BOTTOM).calcs([])


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [models.Threshold(value=None, color="green")]
    if panel.red_from is not None:
        steps.append(models.Threshold(value=panel.red_from, color="red"))
    if panel.red_below is not None:
        steps = [models.Threshold(value=None, color="red"), models.Threshold(value=panel.red_below, color="green")]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _lines(panel: Panel) -> timeseries.Panel:
    stacked = panel.kind == "stack"
    mode = options.StackingMode.NORMAL if stacked else options.StackingMode.NONE
    builder = timeseries.Panel().legend(_legend()).line_width(1).fill_opacity(30 if stacked else 0)
    builder.tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI))
    builder.stacking(common.StackingConfig().mode(mode).group("A")).show_points(options.VisibilityMode.AUTO)
    if panel.red_below is not None:
        builder.thresholds_style(common.GraphThresholdsStyleConfig().mode(options.GraphThresholdsStyleMode.DASHED))
    if panel.log:
        return builder.scale_distribution(common.ScaleDistributionConfig().type(options.ScaleDistribution.LOG).log(10))
    return builder.axis_soft_min(0)


def _draw(panel: Panel) -> Builder:
    match panel.kind:
        case "stat":
            last = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
            return stat.Panel().reduce_options(last).color_mode(options.BigValueColorMode.VALUE)
        case "states":
            words = {"0": ("down", "red"), "1": ("up", "green")}
            results = {key: models.ValueMappingResult(text=text, color=color) for key, (text, color) in words.items()}
            builder = statetimeline.Panel().mappings([models.ValueMap(options=results)]).legend(_legend())
            return builder.show_value(options.VisibilityMode.NEVER).row_height(0.8)
        case "heat":
            colour = heatmap.HeatmapColorOptions().mode(heatmap_options.HeatmapColorMode.SCHEME).scheme("Viridis")
            return heatmap.Panel().calculate(False).color(colour.steps(64).exponent(0.5)).show_legend()
        case _:
            return _lines(panel)


def _build(panel: Panel, *, panel_id: int, x: int, y: int) -> Builder:
    builder = _draw(panel)
    builder.id(panel_id).title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE)
    builder.grid_pos(models.GridPos(x=x, y=y, w=panel.width, h=panel.height)).thresholds(_thresholds(panel))
    for ref, (legend, expr) in zip("ABCDEF", panel.queries.items(), strict=False):
        query = prometheus.Dataquery().expr(narrowed(expr)).legend_format(legend).ref_id(ref).datasource(SOURCE).range()
        builder.with_target(query.format(PromQueryFormat.HEATMAP) if panel.kind == "heat" else query)
    return builder


def _placed(panels: tuple[Panel, ...], y: int) -> Iterator[tuple[Panel, int, int]]:
    """Panels from left to right, then on the next line: (panel, x, y)."""
    x, height = 0, 0
    for panel in panels:
        if x + panel.width > COLUMNS:
            x, y, height = 0, y + height, 0
        yield panel, x, y
        x, height = x + panel.width, max(height, panel.height)


def render() -> str:
    """The dashboard as JSON, the same bytes every time."""
    source = dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    board = dashboard.Dashboard("AirMoE on Ray").uid("airmoe-on-ray").tags(["airmoe"]).version(1).readonly()
    board.description("Generated by dashboards/build.py; edit that, not this.").with_variable(source)
    for name, query in VARIABLES.items():
        variable = dashboard.QueryVariable(name).query(query).datasource(SOURCE).multi(True).include_all(True)
        everything = models.VariableOption(text="All", value="$__all")
        refresh = models.VariableRefresh.ON_TIME_RANGE_CHANGED
        board.with_variable(variable.all_value(".*").current(everything).refresh(refresh))
    board.time("now-30m", "now").refresh("10s").timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
    y = 0
    for number, (title, panels) in enumerate((ROWS | RAY_ROWS).items(), start=1):
        # ids of a row's panels start at its own, so that a new panel leaves links to other rows alone
        board.with_row(dashboard.Row(title).id(100 * number).grid_pos(models.GridPos(x=0, y=y, w=COLUMNS, h=1)))
        bottom = y + 1
        for count, (panel, x, top) in enumerate(_placed(panels, y + 1), start=1):
            board.with_panel(_build(panel, panel_id=100 * number + count, x=x, y=top))
            bottom = max(bottom, top + panel.height)
        y = bottom
    return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def render_rules() -> str:
    """Rules and alerts as one object of the Prometheus Operator."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]
    rule: dict[str, Any] = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "airmoe", "labels": {"release": "prometheus"}},
        "spec": {"groups": groups},
    }
    note = "# Generated by dashboards/build.py from dashboards/rules; edit those, not this.\n"
    return note + yaml.safe_dump(rule, sort_keys=False, width=120)


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    for target, text in ((TARGET, render()), (KUBERNETES_RULES, render_rules())):
        target.write_text(text, encoding="utf-8")
        print(f"wrote {target}")
