import { render } from "preact";
import { ControlRoom } from "./control-room";
import "./style.css";
import "./dashboard.css";

const place = document.getElementById("app");
if (place) render(<ControlRoom />, place);
