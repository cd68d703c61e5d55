"""The page of a run, section by section."""

import platform
import shlex
from html import escape
from typing import Any

import numpy as np
import torch

from airmoe_ray import __version__
from airmoe_ray.config_file import to_yaml
from airmoe_ray.experiments.report.channel_section import amount, channel_section
from airmoe_ray.experiments.report.measure import Example, RunFacts
from airmoe_ray.experiments.report.page import figure, page, paragraph, picture, row, section, table, tiles
from airmoe_ray.experiments.report.svg import Line, bar_chart, heat_map, line_chart, scatter

_TERMS = {"loss": "all", "ce": "cross-entropy", "shared": "cloud's own head", "align": "alignment", "iou": "IoU"}


def run_page(facts: RunFacts, *, name: str, command: str) -> str:
    """A page about one run; `command` is what made it."""
    sections = (
        _head(facts, name),
        _curves(facts),
        _classes(facts),
        _examples(facts),
        _routing(facts),
        _tokens(facts.examples),
        channel_section(facts.config, facts.scores["communication"], facts.scores["confusion"]),
        _made(facts, name, command),
    )
    return page(f"AirMoE run {name}", sections)


def _head(facts: RunFacts, name: str) -> str:
    scores, config = facts.scores, facts.config
    about = (
        f"{scores['images']} images of {config.data.name} ({facts.split}), backbone {config.backbone.name}, N "
        f"{config.experts.count} clients, K {config.routing.top_k} routed, {_channel_words(facts)}"
    )
    routing = scores["routing"]
    figures = [
        (f"{scores['miou']:.1f}", "mIoU, %"),
        (f"{scores['mf1']:.1f}", "mF1, %"),
        (f"{scores['mpre']:.1f}", "mean precision, %"),
        (f"{scores['mrec']:.1f}", "mean recall, %"),
        (f"{routing['balancedness']:.2f}", "balancedness of load (1 is even)"),
        (f"{routing['nmi_domain_expert']:.2f}", "NMI of domain and best client"),
        (amount(scores["communication"]["uplink_routing_bits"]), "bits of statistics up per image"),
        ("exact" if routing["nmse_db"] is None else f"{routing['nmse_db']:.1f} dB", "NMSE of the channel"),
    ]
    simulated = paragraph("The radio is simulated: fading, noise and superposition are arithmetic.", "quiet")
    return (
        f"<header><h1>{escape(name)}</h1>{paragraph(about)}{simulated}</header>\n{_unfinished(facts)}{tiles(figures)}"
    )


def _channel_words(facts: RunFacts) -> str:
    channel = facts.config.channel
    if channel.kind == "ideal":
        return "ideal channel"
    return f"{channel.kind} at {channel.snr_db:g} dB, fading {channel.fading}"


def _unfinished(facts: RunFacts) -> str:
    done, epochs = len(facts.log), facts.config.train.epochs
    if not facts.log or done >= epochs:
        return ""
    return paragraph(f"This run is not finished: {done} of {epochs} epochs are in its log.", "warn")


def _curves(facts: RunFacts) -> str:
    log = facts.log
    if not log:
        return section(
            "Training", paragraph("There is no training log (metrics.jsonl) beside this checkpoint.", "quiet")
        )
    epochs = [row["epoch"] for row in log]
    terms = [
        Line(words, epochs, [row[key] for row in log])
        for key, words in _TERMS.items()
        if all(key in row for row in log) and any(row[key] > 0 for row in log)
    ]
    charts = [figure(line_chart(terms, title="Training loss", x_label="epoch", y_label="loss", log=True))]
    for score, name in (("miou", "mIoU"), ("mf1", "mF1")):
        scored = [row for row in log if score in row]
        if scored:
            at = [row["epoch"] for row in scored]
            keys = {score: "configured channel", f"{score}_ideal": "exact sum"}
            lines = [
                Line(words, at, [row[key] for row in scored])
                for key, words in keys.items()
                if all(key in row for row in scored)
            ]
            title = f"Validation, {name}"
            charts.append(figure(line_chart(lines, title=title, x_label="epoch", y_label=f"{name}, %")))
    seconds = sum(row.get("seconds", 0) + row.get("validation_seconds", 0) for row in log)
    words = f"{len(log)} epochs in {seconds:.0f} s, {log[-1].get('images_per_s', 0):.1f} images/s in the last one."
    return section("Training", row(*charts), paragraph(words, "quiet"))


def _classes(facts: RunFacts) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("class", "IoU, %", "F1, %", "precision, %", "recall, %", ""))
    body = ""
    for name, scores in facts.scores["per_class"].items():
        cells = "".join(f"<td>{'absent' if v is None else f'{v:.1f}'}</td>" for v in scores.values())
        bar = f'<td class="bar"><i style="width:{scores["iou"] or 0:.1f}%"></i></td>'
        body += f"<tr><td>{escape(name)}</td>{cells}{bar}</tr>"
    per_class = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    domains = [
        (name, *(f"{s[key]:.1f}" for key in ("miou", "mf1", "mpre", "mrec")))
        for name, s in facts.scores["per_domain"].items()
    ]
    per_domain = table(("domain", "mIoU, %", "mF1, %", "mPre, %", "mRec, %"), domains)
    maps = "".join(_confusion(part) for part in facts.scores["confusion"])
    return section("Classes and domains", row(per_class, per_domain), maps)


def _confusion(part: dict[str, Any]) -> str:
    pixels = np.array(part["pixels"], dtype=float)
    shares = pixels / np.maximum(pixels.sum(axis=1, keepdims=True), 1)
    title = "Confusion" + (f", {part['part']}" if part["part"] else "")
    chart = heat_map(
        shares.tolist(), part["classes"], part["classes"], title=title, x_label="prediction", y_label="truth"
    )
    return figure(chart, "Of the pixels of each true class, the share that was taken for each class, in per cent.")


def _examples(facts: RunFacts) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("domain", "image", "truth", "prediction", "overlay"))
    body = ""
    for example in facts.examples:
        cells = (
            picture(example.image, alt=f"{example.domain}, image", photograph=True),
            picture(example.truth, alt=f"{example.domain}, truth", photograph=False),
            picture(example.prediction, alt=f"{example.domain}, prediction", photograph=False),
            picture(example.overlay, alt=f"{example.domain}, overlay", photograph=True),
        )
        routed = ", ".join(map(str, example.routed))
        words = f'{escape(example.domain)}<br><span class="quiet">clients {routed}</span>'
        body += f"<tr><th>{words}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    colours = zip(facts.card.classes, facts.card.palette, strict=True)
    legend = "".join(
        f'<span><i style="background:rgb({r},{g},{b})"></i>{escape(name)}</span>' for name, (r, g, b) in colours
    )
    grid = f'<table class="examples"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    note = paragraph(
        "The first image of each domain, and the clients routed for it, best first. Void is black.", "quiet"
    )
    return section("Examples", note, grid, f'<p class="legend">{legend}</p>')


def _routing(facts: RunFacts) -> str:
    routing = facts.scores["routing"]
    if facts.config.experts.count == 1:
        return section("Routing", paragraph("One client: there is nothing to route.", "quiet"))
    clients = [str(client) for client in range(facts.config.experts.count)]
    bars = bar_chart(routing["load"], clients, title="Load", y_label="of the fair share", mark=1.0)
    counts = np.array(routing["top_by_domain"], dtype=float)
    seen = counts.sum(axis=1) > 0
    shares = counts[seen] / counts[seen].sum(axis=1, keepdims=True)
    names = [name for name, here in zip(facts.domains, seen, strict=True) if here]
    chart = heat_map(shares.tolist(), names, clients, title="Best client by domain", x_label="client", y_label="domain")
    effective = routing["effective_prototypes"]
    rows = [
        ("least-used client, of its fair share", f"{routing['least_load']:.2f}"),
        ("prototypes that answer a read, exp H(alpha)", "-" if effective is None else f"{effective:.1f}"),
        ("routed but silent in deep fade", f"{100 * routing['truncated_share']:.1f} %"),
    ]
    knows = facts.card.clients
    known = (
        table(("client", "knows"), [(str(j), words) for j, words in enumerate(knows)], kind="words") if knows else ""
    )
    return section(
        "Routing",
        row(
            figure(bars, "How often each client was among the K routed; the dashed line is an even share."),
            figure(chart, "Of each domain's images, the share whose best client it was, in per cent."),
            kind="stack",
        ),
        row(table(("figure", "value"), rows), known),
    )


def _tokens(examples: list[Example]) -> str:
    charts, rows = [], []
    for example in examples:
        seen = example.tokens
        charts.append(
            figure(
                scatter(
                    seen.tokens_T2, seen.prototypes_M2, seen.query_2, title=f"{example.domain}: client {seen.client}"
                )
            )
        )
        ratio = f"{seen.among_prototypes / seen.among_tokens:.2f}" if len(seen.prototypes_M2) > 1 else "-"
        figures = (seen.among_tokens, seen.among_prototypes, seen.to_nearest, seen.query_to_nearest)
        rows.append((example.domain, str(seen.client), *(f"{value:.3f}" for value in figures), ratio))
    words = (
        "t-SNE of the backbone's tokens of one image (points) with the prototypes of the client routed first (crosses) "
        "as in the paper's Fig. 6. Tokens go through phi into the prototypes' space, each as if it were an image of "
        "its own, and both are taken as Eq. (9) compares them; the ring is the query of the whole image, which is what "
        "the client reads. Distances below are those before t-SNE, which keeps neighbours, not scale or density. "
        "Crosses close together may be expertise, and are also what a collapsed library looks like: see prototypes / "
        "tokens, and above the number of prototypes that answer a read."
    )
    head = (
        "domain",
        "client",
        "among tokens",
        "among prototypes",
        "token to nearest prototype",
        "query to nearest prototype",
        "prototypes / tokens",
    )
    return section(
        "Tokens and prototypes",
        paragraph(words),
        row(*charts, kind="maps"),
        paragraph("Mean distances:"),
        table(head, rows),
    )


def _made(facts: RunFacts, name: str, command: str) -> str:
    versions = [
        ("airmoe", facts.card.airmoe_version, __version__),
        ("torch", facts.card.torch_version, str(torch.__version__)),
        ("Python", "", platform.python_version()),
        ("backbone", f"{facts.card.backbone_name} {facts.card.backbone_fingerprint[:12]}", ""),
    ]
    run = shlex.quote(name)
    commands = (
        f"{command}\n"
        f"airmoe eval --run {run} --split {facts.split}\n"
        f"airmoe train --config {run}/config.yaml --run {run}-again   # once more, where this is a run's folder"
    )
    return section(
        "How it was made",
        table(("", "of the model", "of this page"), versions, kind="words"),
        f"<pre>{escape(commands)}</pre>",
        paragraph("All settings, as they were in force for this page:"),
        f'<pre class="settings">{escape(to_yaml(facts.config))}</pre>',
    )
