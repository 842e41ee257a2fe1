package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/internal/wire"
)

// addLogLevel adds --log-level, whose value setLog reads.
func addLogLevel(cmd *cobra.Command, level *string) {
	cmd.Flags().StringVar(level, "log-level", "info", "debug, info, warn or error")
}

// setLog makes the default logger: text on a terminal, else JSON, to w.
func setLog(w io.Writer, level string) error {
	var least slog.Level
	if err := least.UnmarshalText([]byte(strings.ToUpper(level))); err != nil {
		return fmt.Errorf("--log-level is %q, want debug, info, warn or error", level)
	}
	options := &slog.HandlerOptions{Level: least, ReplaceAttr: plainAttr}
	if f, ok := w.(*os.File); ok && isTerminal(f) {
		slog.SetDefault(slog.New(slog.NewTextHandler(w, options)))
		return nil
	}
	slog.SetDefault(slog.New(slog.NewJSONHandler(w, options)))
	return nil
}

// plainAttr gives each thing one name and one form in all lines.
func plainAttr(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 && a.Key == "err" {
		a.Key = "error"
	}
	a.Value = wire.PlainValue(a.Value)
	return a
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
