"use strict";
const root = document.documentElement;
const themes = ["auto", "light", "dark"];
const button = document.getElementById("theme");
function setTheme(name) {
  if (name === "auto") root.removeAttribute("data-theme");
  else root.setAttribute("data-theme", name);
  button.textContent = "theme: " + name;
  button.dataset.now = name;
}
button.hidden = false;
button.addEventListener("click", () => {
  setTheme(themes[(themes.indexOf(button.dataset.now) + 1) % themes.length]);
});
setTheme("auto");

const tip = document.getElementById("tip");
function place(event) {
  const shown = event.target.closest ? event.target.closest("[data-tip]") : null;
  if (!shown) {
    tip.style.display = "none";
    return;
  }
  tip.textContent = shown.dataset.tip;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 6);
  const below = event.clientY + 18;
  const above = event.clientY - box.height - 10;
  tip.style.left = Math.max(6, left) + "px";
  tip.style.top = (below + box.height < window.innerHeight ? below : Math.max(4, above)) + "px";
}
document.addEventListener("pointermove", place);
document.addEventListener("pointerdown", place);
document.addEventListener("scroll", () => { tip.style.display = "none"; }, { passive: true });

const tabs = [...document.querySelectorAll(".steps button")];
function choose(name) {
  for (const tab of tabs) {
    const chosen = tab.dataset.step === name;
    tab.setAttribute("aria-selected", String(chosen));
    document.getElementById(tab.dataset.step).hidden = !chosen;
  }
}
for (const tab of tabs) tab.addEventListener("click", () => choose(tab.dataset.step));
if (tabs.length) choose(tabs[0].dataset.step);
