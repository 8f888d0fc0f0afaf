// Equations between \( \) and \[ \], which pymdownx.arithmatex makes of $ and $$.
window.MathJax = {
  tex: {inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]]},
  options: {ignoreHtmlClass: ".*", processHtmlClass: "arithmatex"},
};
