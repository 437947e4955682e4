"use strict";(self.rspackChunksgd_workbench=self.rspackChunksgd_workbench||[]).push([[931],{475(r,o,e){var t=e(601),a=e.n(t),i=e(314),n=(e.n(i))()(a());n.push([r.id,`.wb-Panel .wb-SectionBox {
  display: flex;
  flex-direction: column;
  overflow: hidden;
}

.wb-Section {
  flex: 1 1 auto;
  overflow-y: auto;
  color: var(--jp-ui-font-color1);
  font-size: var(--jp-ui-font-size1);
}

.wb-List {
  list-style: none;
  margin: 0;
  padding: 0;
}

.wb-Row {
  padding: 6px 8px 7px 10px;
  border-bottom: var(--jp-border-width) solid var(--jp-border-color2);
}

.wb-Row:hover {
  background: var(--jp-layout-color2);
}

.wb-Row-head {
  display: flex;
  align-items: center;
  gap: 6px;
  min-height: 24px;
}

.wb-Row-title {
  flex: 1 1 auto;
  min-width: 0;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
  font-weight: 600;
}

.wb-Row-buttons {
  display: flex;
  flex: 0 0 auto;
}

.wb-Row-body {
  display: flex;
  align-items: flex-end;
  justify-content: space-between;
  gap: 8px;
}

.wb-Fact {
  display: inline-block;
  max-width: 100%;
  overflow: hidden;
  text-overflow: ellipsis;
  vertical-align: bottom;
  white-space: nowrap;
}

.wb-Copy {
  display: flex;
  flex-wrap: wrap;
  gap: 6px;
}

.wb-Row-facts {
  margin-left: 15px;
  color: var(--jp-ui-font-color2);
  font-size: var(--jp-ui-font-size0);
  line-height: 16px;
  overflow-wrap: anywhere;
}

.wb-Row-error {
  margin: 2px 0 0 15px;
  color: var(--jp-error-color1);
  font-size: var(--jp-ui-font-size0);
  line-height: 16px;
  display: -webkit-box;
  -webkit-box-orient: vertical;
  -webkit-line-clamp: 2;
  overflow: hidden;
  overflow-wrap: anywhere;
}

.wb-Trouble {
  display: block;
  margin: 8px 12px;
  font-size: var(--jp-ui-font-size1);
  white-space: pre-wrap;
}

.wb-Dot {
  flex: 0 0 auto;
  box-sizing: border-box;
  display: inline-block;
  width: 9px;
  height: 9px;
  border: 2px solid var(--jp-ui-font-color3);
  border-radius: 50%;
}

.wb-Dot[data-state='running'],
.wb-Dot[data-state='starting'] {
  border-color: var(--jp-success-color1);
  background: var(--jp-success-color1);
}

.wb-Dot[data-state='ready'] {
  border-color: var(--jp-success-color1);
}

.wb-Dot[data-state='paused'] {
  border-color: var(--jp-warn-color1);
  background: var(--jp-warn-color1);
}

.wb-Dot[data-state='detached'] {
  border-color: var(--jp-brand-color1);
}

.wb-Dot[data-state='failed'],
.wb-Dot[data-state='killed'],
.wb-Dot[data-state='lost'] {
  border-color: var(--jp-error-color1);
  background: var(--jp-error-color1);
  border-radius: 1px;
}

.wb-State {
  font-weight: 600;
}

.wb-State[data-state='failed'],
.wb-State[data-state='killed'],
.wb-State[data-state='lost'] {
  color: var(--jp-error-color1);
}

.wb-Link {
  padding: 0;
  border: 0;
  background: none;
  color: inherit;
  font: inherit;
  text-align: left;
  cursor: pointer;
}

.wb-Row-title.wb-Link {
  font-weight: 600;
}

.wb-Link:hover {
  color: var(--jp-content-link-color);
  text-decoration: underline;
}

.wb-IconButton {
  display: inline-flex;
  align-items: center;
  justify-content: center;
  width: 24px;
  height: 24px;
  padding: 0;
  border: 0;
  border-radius: var(--jp-border-radius);
  background: none;
  cursor: pointer;
}

.wb-IconButton:hover:not(:disabled) {
  background: var(--jp-layout-color3);
}

.wb-IconButton:disabled {
  opacity: 0.4;
  cursor: default;
}

.wb-IconButton span,
.wb-IconButton svg {
  display: flex;
}

.wb-Button,
.wb-Toggle {
  padding: 3px 10px;
  border: var(--jp-border-width) solid var(--jp-border-color1);
  border-radius: var(--jp-border-radius);
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-family: var(--jp-ui-font-family);
  font-size: var(--jp-ui-font-size1);
  line-height: 18px;
  white-space: nowrap;
  cursor: pointer;
}

.wb-Button:hover:not(:disabled),
.wb-Toggle:hover {
  background: var(--jp-layout-color2);
}

.wb-Button:disabled {
  opacity: 0.5;
  cursor: default;
}

.wb-Toggle[aria-pressed='true'] {
  border-color: var(--jp-brand-color1);
  background: var(--jp-layout-color2);
  font-weight: 600;
}

.wb-Button:focus-visible,
.wb-Toggle:focus-visible,
.wb-IconButton:focus-visible,
.wb-Link:focus-visible,
.wb-Table th button:focus-visible,
.wb-TableBox:focus-visible {
  outline: 2px solid var(--jp-brand-color1);
  outline-offset: -2px;
}

.wb-More {
  display: block;
  margin: 8px auto 12px;
}

.wb-Empty {
  padding: 12px 14px;
  color: var(--jp-ui-font-color2);
  line-height: 18px;
}

.wb-Empty p {
  margin: 0 0 10px;
  overflow-wrap: anywhere;
}

.wb-Empty code,
.wb-Button code {
  font-family: var(--jp-code-font-family);
  font-size: var(--jp-ui-font-size1);
  background: none;
}

.wb-Quiet,
.wb-Empty .wb-Quiet {
  color: var(--jp-ui-font-color2);
  font-size: var(--jp-ui-font-size0);
}

.wb-Empty .wb-Quiet {
  margin-top: 10px;
}

.wb-Sparkline {
  flex: 0 0 64px;
  width: 64px;
  height: 20px;
  fill: none;
  stroke: var(--jp-brand-color1);
  stroke-width: 1.4;
  stroke-linejoin: round;
}

.wb-Sparkline circle {
  fill: var(--jp-brand-color1);
  stroke: none;
}

.wb-Progress {
  height: 3px;
  margin: 5px 0 0 15px;
  border-radius: 2px;
  background: var(--jp-layout-color3);
  overflow: hidden;
}

.wb-Progress div {
  height: 100%;
  background: var(--jp-success-color1);
}

.wb-Row[data-status='paused'] .wb-Progress div {
  background: var(--jp-warn-color1);
}

.wb-Spacer {
  flex: 1 1 auto;
}

.wb-Pane {
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-family: var(--jp-ui-font-family);
  font-size: var(--jp-ui-font-size1);
  overflow: auto;
}

.wb-Pane h3 {
  margin: 12px 16px 4px;
  font-size: var(--jp-ui-font-size1);
}

.wb-Log,
.wb-Failure pre {
  margin: 0 16px 12px;
  padding: 8px;
  border: var(--jp-border-width) solid var(--jp-border-color2);
  background: var(--jp-layout-color0);
  color: var(--jp-content-font-color1);
  font-family: var(--jp-code-font-family);
  font-size: var(--jp-code-font-size);
  line-height: var(--jp-code-line-height);
  white-space: pre-wrap;
  overflow-wrap: anywhere;
  max-height: 480px;
  overflow: auto;
}

.wb-Run {
  max-width: 1100px;
  padding: 12px 16px 24px;
}

.wb-Run-header {
  display: flex;
  flex-wrap: wrap;
  align-items: center;
  gap: 8px;
}

.wb-Run-header h2 {
  margin: 0;
  min-width: 0;
  font-size: var(--jp-ui-font-size3);
  font-weight: 600;
  overflow-wrap: anywhere;
}

.wb-Facts {
  display: flex;
  flex-wrap: wrap;
  gap: 8px 22px;
  margin: 12px 0 8px;
}

.wb-Facts dt {
  color: var(--jp-ui-font-color2);
  font-size: var(--jp-ui-font-size0);
}

.wb-Facts dd {
  margin: 0;
  overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums;
}

.wb-Facts-wide {
  flex: 1 0 100%;
}

.wb-Run .wb-Trouble {
  margin: 8px 0;
}

.wb-Failure,
.wb-Notes {
  margin: 4px 0 8px;
}

.wb-Failure pre {
  margin: 4px 0;
}

.wb-Axes {
  display: flex;
  flex-wrap: wrap;
  align-items: center;
  gap: 6px;
  margin: 14px 0 6px;
}

.wb-Chart {
  margin: 10px 0;
}

.wb-Chart svg {
  display: block;
}

.wb-Chart-legend {
  display: flex;
  flex-wrap: wrap;
  align-items: center;
  gap: 4px 16px;
  padding-left: 4px;
}

.wb-Chart-title {
  font-weight: 600;
}

.wb-Chart-key {
  display: inline-flex;
  align-items: center;
  gap: 5px;
  color: var(--jp-ui-font-color2);
}

.wb-Chart-grid {
  stroke: var(--jp-border-color3);
}

.wb-Chart-axis {
  stroke: var(--jp-border-color1);
}

.wb-Chart-tick {
  fill: var(--jp-ui-font-color2);
  font-size: var(--jp-ui-font-size0);
  font-variant-numeric: tabular-nums;
}

.wb-Chart-line {
  fill: none;
  stroke-width: 1.6;
  stroke-linejoin: round;
}

.wb-Chart-readout {
  display: flex;
  flex-wrap: wrap;
  gap: 4px 16px;
  min-height: 18px;
  padding-left: 52px;
  color: var(--jp-ui-font-color2);
  font-size: var(--jp-ui-font-size0);
  font-variant-numeric: tabular-nums;
}

.wb-TablePane {
  display: flex;
  flex-direction: column;
  overflow: hidden;
}

.wb-Bar {
  display: flex;
  flex: 0 0 auto;
  flex-wrap: wrap;
  align-items: center;
  gap: 8px 6px;
  padding: 8px 10px;
}

.wb-Filter {
  flex: 0 1 280px;
  min-width: 120px;
  padding: 4px 8px;
  border: var(--jp-border-width) solid var(--jp-border-color1);
  border-radius: var(--jp-border-radius);
  background: var(--jp-layout-color0);
  color: var(--jp-ui-font-color1);
  font: inherit;
}

.wb-Columns {
  display: grid;
  grid-template-columns: repeat(auto-fill, minmax(150px, 1fr));
  flex: 0 0 auto;
  box-sizing: border-box;
  gap: 2px 12px;
  max-height: 40%;
  margin: 0 12px 8px;
  padding: 8px 12px;
  border: var(--jp-border-width) solid var(--jp-border-color2);
  border-radius: var(--jp-border-radius);
  overflow: auto;
}

.wb-Columns .wb-Button {
  justify-self: start;
}

.wb-Columns label {
  display: flex;
  align-items: center;
  gap: 6px;
  overflow: hidden;
  white-space: nowrap;
}

.wb-TableBox {
  flex: 1 1 0;
  min-height: 0;
  overflow: auto;
}

.wb-Table {
  min-width: 100%;
  border-spacing: 0;
  table-layout: fixed;
}

.wb-Table th {
  position: sticky;
  top: 0;
  z-index: 1;
  height: 28px;
  padding: 0;
  background: var(--jp-layout-color2);
  border-bottom: var(--jp-border-width) solid var(--jp-border-color1);
  text-align: left;
}

.wb-Table th button {
  width: 100%;
  height: 28px;
  padding: 0 8px;
  border: 0;
  background: none;
  color: inherit;
  font: inherit;
  font-weight: 600;
  text-align: left;
  white-space: nowrap;
  overflow: hidden;
  text-overflow: ellipsis;
  cursor: pointer;
}

.wb-Table tbody tr {
  height: 26px;
}

.wb-Runs tbody tr {
  background: var(--jp-layout-color1);
}

.wb-Table tbody tr:hover,
.wb-Runs tbody tr[data-algorithm] {
  background: var(--jp-layout-color2);
}

.wb-TableBox:focus tbody tr[aria-selected='true'] {
  background: var(--jp-layout-color3);
}

.wb-Table td {
  box-sizing: border-box;
  height: 26px;
  padding: 0 8px;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
  border-bottom: var(--jp-border-width) solid var(--jp-border-color3);
}

.wb-Table td[data-number] {
  font-variant-numeric: tabular-nums;
}

.wb-Table td .wb-Dot {
  margin-right: 7px;
}

.wb-Table th[data-number],
.wb-Plain td[data-number] {
  text-align: right;
}

.wb-Plain {
  min-width: 0;
  table-layout: auto;
}

.wb-Plain th {
  padding: 0 10px;
  font-weight: 600;
  white-space: nowrap;
}

.wb-Plain th button {
  padding: 0;
}

.wb-Plain td {
  padding: 0 10px;
}

.wb-Table tr[data-group] .wb-Link,
.wb-Table tr[data-algorithm] {
  font-weight: 600;
}

.wb-Runs td .wb-Link {
  display: block;
  max-width: 100%;
  overflow: hidden;
  text-overflow: ellipsis;
}

/* the boxes and the first column stay when the others scroll */
.wb-Runs tr > :nth-child(1),
.wb-Runs tr > :nth-child(2) {
  position: sticky;
  left: 0;
  z-index: 1;
  background: inherit;
}

.wb-Runs tr > :nth-child(2) {
  left: 30px;
  border-right: var(--jp-border-width) solid var(--jp-border-color2);
}

.wb-Runs thead tr {
  background: var(--jp-layout-color2);
}

.wb-Runs thead th {
  z-index: 2;
}

.wb-Runs thead tr > :nth-child(1),
.wb-Runs thead tr > :nth-child(2) {
  z-index: 3;
}

.wb-Table .wb-Choice {
  padding: 0;
  text-align: center;
  text-overflow: clip;
}

.wb-Choice input {
  margin: 0;
  vertical-align: middle;
}

.wb-Fold {
  display: inline-block;
  width: 14px;
}

.wb-Ranks {
  padding: 4px 16px 24px;
}

.wb-Scroll {
  margin-top: 14px;
  overflow-x: auto;
}

.wb-Tag {
  margin-left: 8px;
  padding: 1px 6px;
  border: var(--jp-border-width) solid var(--jp-warn-color1);
  border-radius: 8px;
  color: var(--jp-ui-font-color1);
  font-size: var(--jp-ui-font-size0);
}

.wb-Plain tr[data-straggler] td:first-child {
  box-shadow: inset 3px 0 0 var(--jp-warn-color1);
}

.wb-Swatch {
  display: inline-block;
  width: 10px;
  height: 10px;
  margin-right: 7px;
  border-radius: 2px;
}

.wb-Chart-band {
  opacity: 0.18;
  stroke: none;
}

.wb-Row[data-drag] {
  cursor: grab;
}

.wb-Row[data-drag] button {
  cursor: pointer;
}

.wb-Dragged {
  padding: 4px 10px;
  border: var(--jp-border-width) solid var(--jp-brand-color1);
  border-radius: var(--jp-border-radius);
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-family: var(--jp-ui-font-family);
  font-size: var(--jp-ui-font-size1);
}

.wb-TimelinePane {
  display: flex;
  flex-direction: column;
  overflow: hidden;
}

.wb-TimelinePane-place {
  flex: 1;
  min-height: 0;
}

.wb-TimelinePane-other {
  padding: 4px 8px;
  color: var(--jp-ui-font-color2);
}

.wb-TimelinePane [hidden] {
  display: none;
}
`,""]),e.d(o,{},{A:n})},314(r){r.exports=function(r){var o=[];return o.toString=function(){return this.map(function(o){var e="",t=void 0!==o[5];return o[4]&&(e+="@supports (".concat(o[4],") {")),o[2]&&(e+="@media ".concat(o[2]," {")),t&&(e+="@layer".concat(o[5].length>0?" ".concat(o[5]):""," {")),e+=r(o),t&&(e+="}"),o[2]&&(e+="}"),o[4]&&(e+="}"),e}).join("")},o.i=function(r,e,t,a,i){"string"==typeof r&&(r=[[null,r,void 0]]);var n={};if(t)for(var l=0;l<this.length;l++){var p=this[l][0];null!=p&&(n[p]=!0)}for(var d=0;d<r.length;d++){var s=[].concat(r[d]);t&&n[s[0]]||(void 0!==i&&(void 0===s[5]||(s[1]="@layer".concat(s[5].length>0?" ".concat(s[5]):""," {").concat(s[1],"}")),s[5]=i),e&&(s[2]&&(s[1]="@media ".concat(s[2]," {").concat(s[1],"}")),s[2]=e),a&&(s[4]?(s[1]="@supports (".concat(s[4],") {").concat(s[1],"}"),s[4]=a):s[4]="".concat(a)),o.push(s))}},o}},601(r){r.exports=function(r){return r[1]}},966(r,o,e){e.r(o);var t=e(72),a=e.n(t),i=e(825),n=e.n(i),l=e(659),p=e.n(l),d=e(56),s=e.n(d),b=e(540),c=e.n(b),u=e(113),w=e.n(u),f=e(475),h={};h.styleTagTransform=w(),h.setAttributes=s(),h.insert=p().bind(null,"head"),h.domAPI=n(),h.insertStyleElement=c(),a()(f.A,h);let x=f.A&&f.A.locals?f.A.locals:void 0;e.d(o,{},{default:x})},72(r){var o=[];function e(r){for(var e=-1,t=0;t<o.length;t++)if(o[t].identifier===r){e=t;break}return e}function t(r,t){for(var a={},i=[],n=0;n<r.length;n++){var l=r[n],p=t.base?l[0]+t.base:l[0],d=a[p]||0,s="".concat(p," ").concat(d);a[p]=d+1;var b=e(s),c={css:l[1],media:l[2],sourceMap:l[3],supports:l[4],layer:l[5]};if(-1!==b)o[b].references++,o[b].updater(c);else{var u=function(r,o){var e=o.domAPI(o);return e.update(r),function(o){o?(o.css!==r.css||o.media!==r.media||o.sourceMap!==r.sourceMap||o.supports!==r.supports||o.layer!==r.layer)&&e.update(r=o):e.remove()}}(c,t);t.byIndex=n,o.splice(n,0,{identifier:s,updater:u,references:1})}i.push(s)}return i}r.exports=function(r,a){var i=t(r=r||[],a=a||{});return function(r){r=r||[];for(var n=0;n<i.length;n++){var l=e(i[n]);o[l].references--}for(var p=t(r,a),d=0;d<i.length;d++){var s=e(i[d]);0===o[s].references&&(o[s].updater(),o.splice(s,1))}i=p}}},659(r){var o={};r.exports=function(r,e){var t=function(r){if(void 0===o[r]){var e=document.querySelector(r);if(window.HTMLIFrameElement&&e instanceof window.HTMLIFrameElement)try{e=e.contentDocument.head}catch(r){e=null}o[r]=e}return o[r]}(r);if(!t)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");t.appendChild(e)}},540(r){r.exports=function(r){var o=document.createElement("style");return r.setAttributes(o,r.attributes),r.insert(o,r.options),o}},56(r,o,e){r.exports=function(r){var o=e.nc;o&&r.setAttribute("nonce",o)}},825(r){r.exports=function(r){if("u"<typeof document)return{update:function(){},remove:function(){}};var o=r.insertStyleElement(r);return{update:function(e){var t,a,i;t="",e.supports&&(t+="@supports (".concat(e.supports,") {")),e.media&&(t+="@media ".concat(e.media," {")),(a=void 0!==e.layer)&&(t+="@layer".concat(e.layer.length>0?" ".concat(e.layer):""," {")),t+=e.css,a&&(t+="}"),e.media&&(t+="}"),e.supports&&(t+="}"),(i=e.sourceMap)&&"u">typeof btoa&&(t+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(i))))," */")),r.styleTagTransform(t,o,r.options)},remove:function(){var r;null===(r=o).parentNode||r.parentNode.removeChild(r)}}}},113(r){r.exports=function(r,o){if(o.styleSheet)o.styleSheet.cssText=r;else{for(;o.firstChild;)o.removeChild(o.firstChild);o.appendChild(document.createTextNode(r))}}}}]);