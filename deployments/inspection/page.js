"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const bits = Uint8Array.from(atob(data.bits), (char) => char.charCodeAt(0));
  const stride = Math.ceil(data.tokens / 8);
  const kept = (head, token) => (bits[head * stride + (token >> 3)] >> (7 - (token & 7))) & 1;

  const text = document.getElementById("text");
  const tip = document.getElementById("tip");
  const shown = document.getElementById("shown");
  const spans = [...text.querySelectorAll("span")];
  const buttons = [...document.querySelectorAll("td button")];
  const shades = spans.map((span) => span.className);
  const all = shown.textContent;
  const said = spans.map((span) => span.title);
  const place = new Map(spans.map((span, token) => [span, token]));
  // Our own tip is quicker than the browser's, and keys reach it.
  for (const span of spans) span.removeAttribute("title");

  let at = -1;
  let alone = -1;

  function point(token) {
    if (token === at) return;
    if (at >= 0) spans[at].classList.remove("at");
    at = token;
    tip.hidden = token < 0;
    buttons.forEach((button, head) => button.classList.toggle("on", token >= 0 && kept(head, token) === 1));
    if (token < 0) return;
    const span = spans[token];
    span.classList.add("at");
    tip.textContent = alone < 0 ? said[token] : `${said[token]}; ${kept(alone, token) ? "kept" : "evicted"} by this head`;
    const box = span.getBoundingClientRect();
    const below = box.bottom + 8;
    const fits = below + tip.offsetHeight < innerHeight;
    tip.style.top = `${fits ? below : box.top - tip.offsetHeight - 8}px`;
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  }

  function show(head) {
    point(-1);
    alone = head === alone ? -1 : head;
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === alone)));
    spans.forEach((span, token) => {
      const shade = kept(alone, token) ? data.levels : 0;
      span.className = alone < 0 ? shades[token] : shades[token].replace(/l\d+/, `l${shade}`);
    });
    shown.textContent =
      alone < 0 ? all : `Only ${buttons[alone].title}: shaded tokens are kept. Press its cell again for all heads.`;
  }

  text.addEventListener("pointerover", (event) => point(place.get(event.target.closest("span")) ?? -1));
  text.addEventListener("pointerleave", () => point(-1));
  text.addEventListener("blur", () => point(-1));
  text.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") point(-1);
    if (!step) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(spans.length - 1, at + step));
    spans[next].scrollIntoView({ block: "nearest" });
    point(next);
  });
  addEventListener("scroll", () => point(-1), { passive: true });
  buttons.forEach((button, head) => button.addEventListener("click", () => show(head)));
})();
