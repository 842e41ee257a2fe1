package pipe

import (
	"encoding/hex"
	"net"
	"os"
	"strconv"
	"strings"
)

// The kernel's tables of TCP sockets.
const (
	tcpTable  = "/proc/net/tcp"
	tcp6Table = "/proc/net/tcp6"
)

// passedOnByUs reports whether the process at the other end of a connection over loopback, which forwards
// what somebody else says, belongs to this user or to root. One example is a forwarder between two
// container networks. The result is false if the owner is unknown.
func passedOnByUs(conn net.Conn) bool {
	peer, isTCP := conn.RemoteAddr().(*net.TCPAddr)
	own, alike := conn.LocalAddr().(*net.TCPAddr)
	if !isTCP || !alike || !peer.IP.IsLoopback() {
		return false
	}
	path := tcpTable
	if peer.IP.To4() == nil {
		path = tcp6Table
	}
	table, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	uid, known := ownerOf(string(table), peer, own)
	return known && (uid == os.Getuid() || uid == 0)
}

// ownerOf looks in one of the kernel's tables for the user whose socket is at one address and connected to
// another.
func ownerOf(table string, local, remote *net.TCPAddr) (uid int, known bool) {
	from, to := tableAddress(local), tableAddress(remote)
	for line := range strings.Lines(table) {
		const localField, remoteField, stateField, uidField = 1, 2, 3, 7
		const established = "01" // sockets in other states have no owner any more
		fields := strings.Fields(line)
		if len(fields) <= uidField || fields[localField] != from || fields[remoteField] != to || fields[stateField] != established {
			continue
		}
		uid, err := strconv.Atoi(fields[uidField])
		return uid, err == nil
	}
	return 0, false
}

// tableAddress is an address in the form that the kernel's tables have on little-endian machines: each four
// bytes are one number. On other machines nothing is found, and every forwarder is refused.
func tableAddress(a *net.TCPAddr) string {
	ip := a.IP.To4()
	if ip == nil {
		ip = a.IP.To16()
	}
	turned := make([]byte, 0, len(ip))
	for i := 0; i+4 <= len(ip); i += 4 {
		turned = append(turned, ip[i+3], ip[i+2], ip[i+1], ip[i])
	}
	return strings.ToUpper(hex.EncodeToString(turned)) + ":" + strings.ToUpper(hex.EncodeToString([]byte{byte(a.Port >> 8), byte(a.Port)}))
}
