// Live pages: a stream tells of changes, and htmx fetches the part that may differ. Actions go to the JSON API.
"use strict";
const notice = document.getElementById("notice");
const link = document.getElementById("link");

function say(words, tone) {
  notice.textContent = words;
  notice.className = tone;
}

function listen(address, version) {
  const stream = new EventSource(`${address}?seen=${version}`); // it resumes by itself, with the last id
  let isLost = false;
  stream.onopen = () => {
    link.textContent = "Live.";
    if (isLost) htmx.trigger(document.body, "changed"); // a service that started anew counts anew
    isLost = false;
  };
  stream.onerror = () => {
    link.textContent = "The service does not answer; trying again.";
    isLost = true;
  };
  stream.addEventListener("changed", () => htmx.trigger(document.body, "changed"));
  stream.addEventListener("ended", () => { stream.close(); location.reload(); });
}

// The lines `key=value` of a form's text, as settings of a retry.
function typed(form) {
  const lines = form.querySelector("textarea").value.split("\n").map((line) => line.trim()).filter(Boolean);
  return Object.fromEntries(lines.map((line) => [line.split("=", 1)[0].trim(), line.split("=").slice(1).join("=").trim()]));
}

// An action is JSON, as the API takes it, and its values keep their types.
htmx.defineExtension("json", {
  onEvent: (name, event) => {
    if (name === "htmx:configRequest") event.detail.headers["Content-Type"] = "application/json";
    return true;
  },
  encodeParameters: (xhr, parameters, element) => element.getAttribute("hx-vals") || JSON.stringify({ settings: typed(element) }),
});

document.body.addEventListener("htmx:afterRequest", (event) => {
  const { elt, xhr, successful } = event.detail;
  if (elt.getAttribute("hx-ext") !== "json") return;
  if (successful) {
    if (elt.dataset.then) location.assign(elt.dataset.then);
    else say("Done.", "good");
    return;
  }
  let words = "The service does not answer.";
  try { words = JSON.parse(xhr.responseText).error; } catch { /* no answer at all */ }
  say(words, "bad");
});

// What the reader opened stays open; an answer that differs in nothing changes nothing.
let last = "";
document.body.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.target.id !== "live") return;
  if (event.detail.serverResponse === last) event.detail.shouldSwap = false;
  last = event.detail.serverResponse;
});
const kept = { open: [], closed: [], across: [], end: false, down: 0 };
document.body.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.target.id !== "live") return;
  const all = [...document.querySelectorAll("#live details[id]")];
  kept.open = all.filter((one) => one.open).map((one) => one.id);
  kept.closed = all.filter((one) => !one.open).map((one) => one.id);
  kept.across = [...document.querySelectorAll("#live .wide")].map((one) => one.scrollLeft);
  const log = document.getElementById("log");
  kept.end = !log || log.scrollTop + log.clientHeight > log.scrollHeight - 40;
  kept.down = log ? log.scrollTop : 0;
});
document.body.addEventListener("htmx:afterSwap", () => {
  for (const id of kept.open) document.getElementById(id)?.setAttribute("open", "");
  for (const id of kept.closed) document.getElementById(id)?.removeAttribute("open");
  document.querySelectorAll("#live .wide").forEach((one, index) => { one.scrollLeft = kept.across[index] || 0; });
  const log = document.getElementById("log");
  if (log) log.scrollTop = kept.end ? log.scrollHeight : kept.down;
});

// A file of the reader's machine fills the text beside it; the page sends the text.
const FILE_BYTES_MAX = 2 ** 18;
document.querySelector("input[data-fills]")?.addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  if (file.size > FILE_BYTES_MAX) return say(`${file.name} is no job file: it has more than 256 KiB.`, "bad");
  document.getElementById(event.target.dataset.fills).value = await file.text();
  say(`${file.name} is in the text below.`, "good");
});

// A browser sends no fragment, and those of MLflow's pages name the page: sign in leads back to it.
const next = document.querySelector("form input[name=next]");
if (next) next.value += location.hash;

const log = document.getElementById("log");
if (log) log.scrollTop = log.scrollHeight;
if (document.body.dataset.events) listen(document.body.dataset.events, document.body.dataset.version);
