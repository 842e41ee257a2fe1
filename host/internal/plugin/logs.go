package plugin

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
)

// What a plugin may write to our log: a burst, and lines per second after it.
const (
	logBurst = 200
	logRate  = 50
	logLine  = 4 << 10 // bytes of one line; longer ones are cut
)

// pluginLog passes a plugin's lines on to slog, a bounded number of them.
type pluginLog struct {
	log  *slog.Logger
	name string // of the binary, under which go-plugin passes the plugin's own lines

	mu     sync.Mutex
	debug  bucket // of lines of level debug, so that who looks at these loses none of the others
	others bucket
}

// bucket bounds lines: it has room for a burst, and refills.
type bucket struct {
	tokens  float64
	filled  time.Time
	dropped int
}

func newPluginLog(log *slog.Logger, name string) *pluginLog {
	full := bucket{tokens: logBurst, filled: time.Now()}
	return &pluginLog{log: log, name: name, debug: full, others: full}
}

// hclog makes the logger that go-plugin requires.
func (p *pluginLog) hclog() hclog.Logger {
	l := hclog.NewInterceptLogger(&hclog.LoggerOptions{Level: hclog.Debug, Output: io.Discard})
	l.RegisterSink(p)
	return l
}

// Accept implements hclog.SinkAdapter. What go-plugin itself has to say is for debugging only: our
// own supervisor reports deaths.
func (p *pluginLog) Accept(name string, level hclog.Level, msg string, args ...any) {
	to := slog.LevelDebug
	if name == p.name {
		to = levels(level)
	}
	p.write(to, msg, args)
}

func levels(l hclog.Level) slog.Level {
	switch l {
	case hclog.Error:
		return slog.LevelError
	case hclog.Warn:
		return slog.LevelWarn
	case hclog.Info:
		return slog.LevelInfo
	default:
		return slog.LevelDebug
	}
}

// Write implements io.Writer for what the plugin prints.
func (p *pluginLog) Write(b []byte) (int, error) {
	for line := range strings.Lines(string(b)) {
		p.write(slog.LevelInfo, strings.TrimRight(line, "\r\n"), nil)
	}
	return len(b), nil
}

func (p *pluginLog) write(level slog.Level, msg string, args []any) {
	if !p.log.Enabled(context.Background(), level) {
		return
	}
	dropped, ok := p.admit(level, time.Now())
	if !ok {
		return
	}
	if dropped > 0 {
		kind := slog.LevelWarn
		if level < slog.LevelInfo {
			kind = level
		}
		p.log.Log(context.Background(), kind, "plugin writes too much, lines dropped", "dropped", dropped)
	}
	if len(msg) > logLine {
		msg = msg[:logLine] + "..."
	}
	p.log.Log(context.Background(), level, msg, distinct(args)...)
}

// distinct makes the keys of a plugin's line differ from each other and from those of our own lines, of
// which JSON would show both. go-plugin passes the plugin's time on, which is no news.
func distinct(args []any) []any {
	seen := map[string]bool{slog.TimeKey: true, slog.LevelKey: true, slog.MessageKey: true, "plugin": true}
	out := make([]any, 0, len(args))
	for i := 0; i+1 < len(args); i += 2 {
		key, ok := args[i].(string)
		if !ok || key == "timestamp" {
			continue
		}
		if key == "err" {
			key = "error"
		}
		if seen[key] {
			key = "own_" + key
		}
		if !seen[key] {
			seen[key] = true
			out = append(out, key, args[i+1])
		}
	}
	return out
}

// admit reports whether a line may be written, and how many of its kind were dropped before it.
func (p *pluginLog) admit(level slog.Level, now time.Time) (dropped int, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if level < slog.LevelInfo {
		return p.debug.take(now)
	}
	return p.others.take(now)
}

// take takes a line's place. It reports how many lines found none since the last one that did.
func (b *bucket) take(now time.Time) (dropped int, ok bool) {
	b.tokens = min(logBurst, b.tokens+now.Sub(b.filled).Seconds()*logRate)
	b.filled = now
	if b.tokens < 1 {
		b.dropped++
		return 0, false
	}
	b.tokens--
	dropped, b.dropped = b.dropped, 0
	return dropped, true
}

// plainLines stands between a plugin's standard error and go-plugin, which takes any JSON object for a
// line of hclog and panics when "@message", "@level" or "@timestamp" of it is not text. Such lines
// pass with a mark before them, which makes them plain text. Long lines are cut.
type plainLines struct {
	io.Closer
	in  *bufio.Reader
	out bytes.Buffer // lines that go-plugin has not read yet
	err error

	mu   sync.Mutex
	last string // line that says most
	tail []string

	asked bool     // the plugin was told to say where it is: what comes is kept in said and not passed on
	said  []string // at most saidBytes of it
	size  int
	ended chan struct{} // closed when nothing more comes
}

// saidBytes bounds what is kept of what a plugin says when it is told to say where it is.
const saidBytes = 1 << 20

func newPlainLines(r io.ReadCloser) *plainLines {
	return &plainLines{Closer: r, in: bufio.NewReaderSize(r, 2*logLine), ended: make(chan struct{})}
}

// Read implements io.Reader.
func (p *plainLines) Read(b []byte) (int, error) {
	for p.out.Len() == 0 {
		if p.err != nil {
			return 0, p.err
		}
		p.fill()
	}
	return p.out.Read(b)
}

// fill reads one line.
func (p *plainLines) fill() {
	line, err := p.in.ReadSlice('\n')
	if len(line) > 0 {
		line = bytes.TrimRight(line, "\r\n")
		p.note(string(line))
		if !p.answers(line) {
			p.pass(line)
		}
	}
	for errors.Is(err, bufio.ErrBufferFull) { // the rest of the line
		_, err = p.in.ReadSlice('\n')
	}
	if p.err = err; err != nil {
		close(p.ended)
	}
}

// pass passes a line on to go-plugin.
func (p *plainLines) pass(line []byte) {
	if !harmless(line) {
		p.out.WriteString("plugin: ") // after which no line is JSON
	}
	p.out.Write(line)
	p.out.WriteByte('\n')
}

// ask says that the plugin is being told to say where it is.
func (p *plainLines) ask() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = true
}

// answers keeps a line if the plugin was told to say where it is, and reports whether it was.
func (p *plainLines) answers(line []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.asked && p.size+len(line) <= saidBytes {
		p.size += len(line)
		p.said = append(p.said, string(line))
	}
	return p.asked
}

// answer is what came since ask.
func (p *plainLines) answer() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.said)
}

// harmless reports whether go-plugin can read a line.
func harmless(line []byte) bool {
	if b := bytes.TrimLeft(line, " \t\r"); len(b) == 0 || b[0] != '{' {
		return true
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(line, &object); err != nil {
		return true // no JSON for go-plugin either
	}
	for _, key := range []string{"@message", "@level", "@timestamp"} {
		if value, present := object[key]; present && !bytes.HasPrefix(value, []byte{'"'}) {
			return false
		}
	}
	return true
}
