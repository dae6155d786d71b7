-- Head of all scripts: what a key holds is data, whoever wrote it. Scripts make every command by `call`, `try_add`
-- or `add`, so that none ends half way because of what it meets: a key that is no good is set aside first.
-- tokenmill:quarantine is a stream of what was set aside: worker, key, entry (bytes, cut), reason. A whole key
-- goes to tokenmill:quarantine:<key>, where the latest stays for a week.
local QUARANTINE, MAX_ENTRIES, MAX_BYTES, KEPT_S = 'tokenmill:quarantine', 1000, 1024, 604800
local called_by = table.remove(ARGV) -- the worker's name, which ends the arguments of every script

local call

local function type_of(key) return redis.call('TYPE', key).ok end

local function note(key, entry, reason)
  call(
    'XADD', QUARANTINE, 'MAXLEN', MAX_ENTRIES, '*', 'worker', called_by, 'key', string.sub(key, 1, MAX_BYTES),
    'entry', string.sub(entry, 1, MAX_BYTES), 'reason', reason
  )
end

local function set_aside(key, reason)
  local place = QUARANTINE .. ':' .. key
  redis.call('RENAME', key, place)
  redis.call('EXPIRE', place, KEPT_S)
  note(key, '', reason)
end

-- Make a command. One that meets a key of another type, or a stream that takes no more, has done nothing: it
-- is made again once that key is out of the way. Any other error is raised: it may be the server's own state,
-- such as a full memory, and is worth another try.
call = function(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  local why = type(reply) == 'table' and reply.err
  if not why then return reply end
  if string.find(why, 'WRONGTYPE', 1, true) then
    set_aside(key, 'a ' .. type_of(key) .. ', of no use for ' .. command)
  elseif string.find(why, 'exhausted the last possible ID', 1, true) then
    set_aside(key, 'a stream whose ids are used up')
  end
  return redis.call(command, key, ...)
end

-- HINCRBY or HINCRBYFLOAT; nil for what is no number, or too large for another: it stays.
local function try_add(command, key, field, amount)
  call('HEXISTS', key, field)
  local sum = redis.pcall(command, key, field, amount)
  return type(sum) ~= 'table' and sum or nil
end

-- The same; what cannot be added to is noted and starts anew.
local function add(command, key, field, amount)
  if try_add(command, key, field, amount) then return end
  note(key, call('HGET', key, field) or '', 'no number to count on in ' .. field)
  call('HSET', key, field, amount)
end

-- Whether bytes are UTF-8: no client of RQ's can name a job whose id is not.
local CHARACTERS = {
  '[\194-\223][\128-\191]', '\224[\160-\191][\128-\191]', '[\225-\236\238\239][\128-\191][\128-\191]',
  '\237[\128-\159][\128-\191]', '\240[\144-\191][\128-\191][\128-\191]',
  '[\241-\243][\128-\191][\128-\191][\128-\191]', '\244[\128-\143][\128-\191][\128-\191]'
}
local function is_text(bytes)
  for _, character in ipairs(CHARACTERS) do
    if not string.find(bytes, '[\128-\255]') then return true end
    bytes = string.gsub(bytes, character, ' ')
  end
  return not string.find(bytes, '[\128-\255]')
end
