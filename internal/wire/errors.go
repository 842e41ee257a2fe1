package wire

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"unicode/utf8"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// ErrPanic says that the connector panicked and the sdk recovered.
var ErrPanic = errors.New("connector panicked")

// Guard runs call and turns a panic in it into an error, so that one bad request does not take the
// process and everybody's cache with it.
func Guard(log *slog.Logger, what string, call func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			log.Error("connector panicked", "call", what, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = fmt.Errorf("%s: %v: %w", what, p, ErrPanic)
		}
	}()
	return call()
}

// codes ties what a caller can act on to its number. Where an error is several of them the first
// one counts.
func codes() []struct {
	code kvportv1.ErrorCode
	err  error
} {
	return []struct {
		code kvportv1.ErrorCode
		err  error
	}{
		{kvportv1.ErrorCode_ERROR_CODE_PANIC, ErrPanic},
		{kvportv1.ErrorCode_ERROR_CODE_INCOMPATIBLE, connector.ErrIncompatible},
		{kvportv1.ErrorCode_ERROR_CODE_CORRUPT, connector.ErrCorrupt},
		{kvportv1.ErrorCode_ERROR_CODE_OUTDATED, connector.ErrOutdated},
		{kvportv1.ErrorCode_ERROR_CODE_GONE, connector.ErrGone},
		{kvportv1.ErrorCode_ERROR_CODE_BUSY, connector.ErrBusy},
		{kvportv1.ErrorCode_ERROR_CODE_DECLINED, connector.ErrDeclined},
		{kvportv1.ErrorCode_ERROR_CODE_DEADLINE, context.DeadlineExceeded},
		{kvportv1.ErrorCode_ERROR_CODE_CANCELED, context.Canceled},
	}
}

// remoteError is an error of the other end: its text, and the cause that errors.Is finds.
type remoteError struct {
	text  string
	cause error // nil for any other error
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.cause }

// ErrorToProto carries what a caller can act on, the text, and the blocks of a *BlockError (rule
// ERR-01). A *BlockError without blocks fails the whole transfer. A nil error is nil.
func ErrorToProto(err error) *kvportv1.Error {
	if err == nil {
		return nil
	}
	m := &kvportv1.Error{Message: text(err.Error())}
	for _, c := range codes() {
		if errors.Is(err, c.err) {
			m.Code = c.code
			break
		}
	}
	if blocks, ok := errors.AsType[*connector.BlockError](err); ok {
		if blocks.Err != nil {
			m.Message = text(blocks.Err.Error())
		}
		m.Blocks = make([]int32, len(blocks.Blocks))
		for i, b := range blocks.Blocks {
			m.Blocks[i] = int32(b)
		}
	}
	return m
}

// ErrorFromProto is the error at this end. It never fails: a list of blocks that breaks the limits
// is dropped, and with it the claim that other blocks succeeded. A nil message means success.
func ErrorFromProto(m *kvportv1.Error) error {
	if m == nil {
		return nil
	}
	e := &remoteError{text: text(m.GetMessage())}
	for _, c := range codes() {
		if c.code == m.GetCode() {
			e.cause = c.err
		}
	}
	if e.text == "" {
		e.text = "unknown error"
		if e.cause != nil {
			e.text = e.cause.Error()
		}
	}
	if len(m.GetBlocks()) == 0 || len(m.GetBlocks()) > MaxBlocks {
		return e
	}
	blocks := make([]connector.BlockID, len(m.GetBlocks()))
	for i, b := range m.GetBlocks() {
		if b < 0 {
			return e
		}
		blocks[i] = connector.BlockID(b)
	}
	return &connector.BlockError{Blocks: blocks, Err: e}
}

// text is s as a message may carry it: valid UTF-8 within MaxText.
func text(s string) string {
	if len(s) > MaxText {
		s = s[:MaxText]
		for len(s) > 0 && !utf8.RuneStart(s[len(s)-1]) {
			s = s[:len(s)-1]
		}
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
