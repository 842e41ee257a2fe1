package sdk

import (
	"io"
	"log/slog"

	"github.com/kvport/kvport/internal/wire"
)

// maxLogText is the longest string of a log line in bytes: go-plugin splits lines over 64 KiB.
const maxLogText = 16 << 10

// newLogHandler writes slog records as the JSON lines that go-plugin's host understands, so that
// levels and attributes survive the trip over stderr.
func newLogHandler(w io.Writer) slog.Handler {
	return slog.NewJSONHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug - 4, ReplaceAttr: hclogAttr})
}

func hclogAttr(groups []string, a slog.Attr) slog.Attr {
	a.Value = wire.PlainValue(a.Value)
	if a.Value.Kind() == slog.KindString && len(a.Value.String()) > maxLogText {
		a.Value = slog.StringValue(a.Value.String()[:maxLogText] + " ...")
	}
	if len(groups) > 0 {
		return a
	}
	switch a.Key {
	case slog.TimeKey:
		if a.Value.Kind() == slog.KindTime {
			return slog.String("@timestamp", a.Value.Time().Format("2006-01-02T15:04:05.000000Z07:00"))
		}
	case slog.LevelKey:
		if level, ok := a.Value.Any().(slog.Level); ok {
			return slog.String("@level", hclogLevel(level))
		}
	case slog.MessageKey:
		a.Key = "@message"
		return a
	}
	if len(a.Key) > 0 && a.Key[0] == '@' { // the reader treats these as its own
		a.Key = "_" + a.Key[1:]
	}
	return a
}

func hclogLevel(level slog.Level) string {
	switch {
	case level < slog.LevelDebug:
		return "trace"
	case level < slog.LevelInfo:
		return "debug"
	case level < slog.LevelWarn:
		return "info"
	case level < slog.LevelError:
		return "warn"
	}
	return "error"
}
